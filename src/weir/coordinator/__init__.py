"""The one brain of a cell: admission, the ledger's single writer, the queues and the fleet view."""
