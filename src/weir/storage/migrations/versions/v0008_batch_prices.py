"""What part of a price batch requests pay: of prices that exist, all of it."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the columns."""
    op.add_column("price", sa.Column("batch_percent", sa.BigInteger, nullable=False, server_default="100"))
    op.add_column("revision", sa.Column("price_batch_percent", sa.BigInteger, nullable=False, server_default="100"))
