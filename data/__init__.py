"""The demo's corpus and its report; `distca prepare` makes token files of any other text."""
