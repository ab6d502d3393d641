"""OpenAI's surfaces: chat completions, responses, completions and models, in OpenAI's shapes."""
