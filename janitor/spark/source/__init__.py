"""The data source ``tms``: the rows of a table as a DataFrame."""
