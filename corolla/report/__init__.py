"""`corolla report`: one page about one or more runs."""
