"""The look of the tables that tell of a cluster."""

from rich.table import Table


def titled_table(title: str, *headings: str, no_wrap: bool = True) -> Table:
    """An empty table with its title at the left.

    Args:
        title: above the headings.
        headings: of the columns.
        no_wrap: whether cells that are too long for the terminal are cut rather than folded.
    """
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=no_wrap)
    return table
