"""The subcommands of `dlac`, by what they are about."""
