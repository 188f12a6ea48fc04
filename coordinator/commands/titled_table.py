"""The look of the tables that tell of a cluster."""

from rich.table import Table


def titled_table(title: str, *headings: str) -> Table:
    """An empty table with its title at the left; what is too long for the terminal is folded.

    Args:
        title: above the headings.
        headings: of the columns.
    """
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
