"""What tenants reach: validate, count, ask for a grant, relay the stream, report usage. No durable state, no database."""
