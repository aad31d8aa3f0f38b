"""The engine of all methods: it runs their rounds, plain or private."""
