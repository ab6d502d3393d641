"""How a tenant's streams are kept, and whether it was deleted: those that exist keep nothing and stay."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the columns."""
    op.add_column("tenant", sa.Column("retention", sa.JSON))
    op.add_column("tenant", sa.Column("deleted", sa.Boolean, nullable=False, server_default=sa.false()))
