"""The verbs: one file each, with `add_parser(sub)` and `run(args) -> int`. Files that begin with an underscore are shared by them."""
