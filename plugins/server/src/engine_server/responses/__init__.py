"""OpenAI's newer API, whose responses the server may keep."""
