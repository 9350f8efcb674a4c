"""What an operator may ask of a captured table, written into its row; the capture's process does it within seconds."""

from __future__ import annotations

from msgspec.structs import replace

from tidemill.base.errors import Invalid, Missing
from tidemill.metastore.catalogue import CaptureTableRow, Catalogue


async def ask(catalogue: Catalogue, capture: str, table: str) -> CaptureTableRow:
    """Have a table copied again, into a new generation of its topic. Raises Missing, Invalid for one that never was."""

    def asked(found: CaptureTableRow | None) -> CaptureTableRow:
        if found is None:
            raise Missing(f"no such captured table: capture={capture} table={table}.", fix="See tidemill capture list.")
        if found.state in ("refused", "left", "dropped"):
            raise Invalid(f"the table is not captured: {found.reason}", fix=found.fix)
        return replace(found, recopy=True)

    row = await catalogue.change_table(capture, table, asked)
    assert row is not None
    return row
