"""Whom a pool serves: those that exist stay shared, take both service classes and inputs of any length."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the columns; work of tenants that get pools of their own stays there unless they are told otherwise."""
    op.add_column("tenant", sa.Column("leaves_its_pools", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("pool", sa.Column("tenant", sa.Text))
    classes = '["interactive", "batch"]'
    op.add_column("pool", sa.Column("service_classes", sa.JSON, nullable=False, server_default=classes))
    op.add_column("pool", sa.Column("input_tokens_max", sa.BigInteger))
