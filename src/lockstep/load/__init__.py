"""Measure a server that speaks OpenAI's API: what is sent and when, the client, and figures from its records."""
