"""Reservations and the accounts they draw on: hold the worst case, post the actual, give back the rest, once."""
