"""Options that the commands which look at one trace share."""

from __future__ import annotations

from typing import Annotated

import typer

StepsFromOption = Annotated[
    str | None,
    typer.Option(help="Names of the regions that are the steps, as in instrument summarize.", metavar="REGEX"),
]
RankOption = Annotated[
    int | None,
    typer.Option(min=0, help="The rank, of several: by default the one that the others wait for.", metavar="N"),
]
CollectivesOption = Annotated[
    str,
    typer.Option(
        help="The kernels that communicate: 'auto', or a regular expression for their names.", metavar="REGEX"
    ),
]
