"""``instrument mcp``: answers the questions of agents about recordings, over the Model Context Protocol."""

from __future__ import annotations

from pathlib import Path

import typer

from .. import cli


def mcp_command(
    folders: list[Path] = typer.Argument(
        None, metavar="FOLDER...", help="The folders below which files may be read.", show_default=False
    ),
    out: Path | None = cli.option("FOLDER", "The folder into which pages and traces may be written."),
    skill: bool = cli.flag("--skill", "Print the guide for agents, as a skill file, and end."),
) -> None:
    """Answer the questions of agents about recordings, over the Model Context Protocol.

    An agent starts this command, and talks to it on standard input and output. Its tools: runs, diagnose, plan,
    whatif, compare, memory, syncs and query. It reads only below FOLDER, with symbolic links resolved, and writes
    only into --out, whatever a question, a trace or a link names. It needs the package mcp: pip install
    'torch-instrument[mcp]'.
    """
    if skill:
        typer.echo((Path(__file__).parent.parent / "agent" / "skill.md").read_text(encoding="utf-8"), nl=False)
        return
    from ..agent.folders import ServedFolders, install_guard

    with cli.errors_reported():
        if not folders:
            raise ValueError("give the folders below which files may be read: instrument mcp FOLDER...")
        if out is not None:
            ServedFolders(folders)  # refuses what is no folder before another one is made
            out.mkdir(parents=True, exist_ok=True)
        served = ServedFolders(folders, out)
    from ..agent.server import server_of

    server = server_of(served)
    install_guard()
    server.run("stdio")


subcommand = cli.subcommand_of(mcp_command)
