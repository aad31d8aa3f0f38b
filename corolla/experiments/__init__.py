"""Starting, comparing, sweeping and exporting runs."""
