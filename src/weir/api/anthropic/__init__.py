"""Anthropic's surface: messages, their token counts and models, in Anthropic's shapes."""
