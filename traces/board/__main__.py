"""`python -m traces.board`: the cards as a table."""

from traces.board import table

print(table())
