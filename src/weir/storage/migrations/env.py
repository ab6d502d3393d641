"""Runs migrations on the connection that `weir.storage.database` hands over, inside its transaction.

It has no settings of its own, and must never open a database by itself.
"""

from alembic import context

from weir.storage.schema import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
