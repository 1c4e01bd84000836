"""The API process of a server: HTTP as OpenAI's clients speak it, and text."""
