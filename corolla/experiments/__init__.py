"""What is done with runs: start, sweep, compare, export."""
