"""The weights of tenants: those that exist get 1, so that each keeps the share it had."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the column."""
    op.add_column("tenant", sa.Column("weight", sa.BigInteger, nullable=False, server_default="1"))
