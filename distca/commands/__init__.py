"""The subcommands of `distca`: their flags and their reports."""
