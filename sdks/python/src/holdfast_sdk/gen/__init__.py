"""Made by generate.py from holdfast/v1/runtime.proto; not edited by hand."""
