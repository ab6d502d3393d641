"""Revisions with a state of approval and what was signed, aliases with canaries and owners, trusted keys, rollouts.

Revisions that exist are live or revoked, as they were; pools that exist were declared by a start.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the columns and the tables."""
    _revisions()
    op.add_column("pool", sa.Column("declared", sa.Boolean, nullable=False, server_default=sa.true()))
    op.add_column("pool", sa.Column("retired", sa.Boolean, nullable=False, server_default=sa.false()))
    _aliases()
    op.create_table(
        "signing_key",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("public_key", sa.Text, nullable=False),
        sa.Column("roles", sa.JSON, nullable=False),
        sa.Column("tenant", sa.Text),
        sa.Column("not_before_ms", sa.BigInteger, nullable=False),
        sa.Column("not_after_ms", sa.BigInteger),
        sa.Column("revoked", sa.Boolean, nullable=False),
    )
    op.create_table(
        "rollout",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("alias", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text),
        sa.Column("stable", sa.Text, nullable=False),
        sa.Column("canary", sa.Text, nullable=False),
        sa.Column("plan", sa.JSON, nullable=False),
        sa.Column("state", sa.JSON, nullable=False),
        sa.Column("score", sa.JSON),
        sa.Column("pools", sa.JSON, nullable=False),
        sa.Column("former_pools", sa.JSON, nullable=False),
        sa.Column("proposed_by", sa.Text, nullable=False),
        sa.Column("proposed_at_ms", sa.BigInteger, nullable=False),
    )
    op.create_index("audit_of_subject", "audit", ["subject", "at_ms"])


def _revisions() -> None:
    op.add_column("revision", sa.Column("state", sa.Text, nullable=False, server_default="live"))
    op.execute(sa.text("UPDATE revision SET state = 'revoked' WHERE revoked"))
    op.drop_column("revision", "revoked")
    op.add_column("revision", sa.Column("arguments", sa.JSON, nullable=False, server_default="[]"))
    for name in ("artifact_digest", "evaluation", "tenant", "adapter_of", "registered_by", "approved_by"):
        op.add_column("revision", sa.Column(name, sa.Text))


def _aliases() -> None:
    """A key of two columns cannot be made of one in place everywhere: the rows move to a new table."""
    op.rename_table("alias", "former_alias")
    op.create_table(
        "alias",
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("revision", sa.Text, nullable=False),
        sa.Column("default_max_output_tokens", sa.BigInteger, nullable=False),
        sa.Column("canary", sa.JSON),
        sa.PrimaryKeyConstraint("tenant", "name", name="alias_of_tenant"),
    )
    op.execute(
        sa.text(
            "INSERT INTO alias (tenant, name, revision, default_max_output_tokens)"
            " SELECT '', name, revision, default_max_output_tokens FROM former_alias"
        )
    )
    op.drop_table("former_alias")
