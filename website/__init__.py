"""The documentation's site: `make site` builds it with MkDocs from docs/, the README and declarations in the code."""
