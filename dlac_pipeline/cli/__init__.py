"""The subcommands of `dlac`, by their subject."""
