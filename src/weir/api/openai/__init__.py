"""OpenAI's surfaces: chat completions, completions and models, in OpenAI's shapes."""
