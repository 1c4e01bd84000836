"""Mutation testing: small random changes to the code, each of which some test should notice."""
