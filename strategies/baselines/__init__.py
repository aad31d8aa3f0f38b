"""The methods beside the four papers of strategies/, one file per paper."""
