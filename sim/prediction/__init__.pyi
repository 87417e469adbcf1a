from .tables import table as table
