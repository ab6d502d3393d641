"""The tenant API as an OpenAPI 3.1 document: one module per surface, assembled by `document`, served at `/openapi.json`.

Plain data, made from what the parsers and the error tree say. It decides nothing: tests compare it with both.
"""
