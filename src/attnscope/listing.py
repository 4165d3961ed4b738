"""What ``attnscope list`` shows: each implementation's sheet, and why it cannot run here. Needs no torch."""

from __future__ import annotations

from typing import Any

from attnscope import implementation as registry
from attnscope.device import Device, find_device
from attnscope.errors import DeviceError
from attnscope.implementation import FEATURES, Sheet, missing_package

# The columns of the feature table; a gradient of the bias stands behind the bias.
TABLE = tuple(word for one in FEATURES for word in ((one, "bias_gradient") if one == "bias" else (one,)))


def list_implementations() -> list[dict[str, Any]]:
    """One dict per implementation: its sheet, and ``unavailable``: reasons that hold here for every workload."""
    device, why = _device()
    rows = []
    for name in [*registry.names("all"), *registry.names("ladder")]:
        implementation = registry.find(name)
        sheet = implementation.sheet
        rows.append(
            {
                "name": name,
                "summary": implementation.summary,
                "directions": sorted(sheet.directions, reverse=True),
                "dtypes": sorted(sheet.dtypes),
                "compute": {dtype: sheet.compute_precision(dtype) for dtype in sorted(sheet.dtypes)},
                "head_dims": sheet.head_dims(),
                "features": [word for word in FEATURES if word in sheet.features],
                "table": {word: sheet.feature(word) for word in TABLE},
                "forward_only": [word for word in FEATURES if word in sheet.forward_only],
                "devices": sorted(sheet.devices),
                "hardware": sheet.hardware(),
                "layouts": sorted(sheet.layouts),
                "lse": sheet.lse,
                "deterministic": sheet.deterministic,
                "torch_compile": sheet.torch_compile(),
                "draws_dropout": sheet.draws_dropout,
                "cuda_graph": sheet.cuda_graph and "cuda" in sheet.devices,
                "packages": list(sheet.packages),
                "approximate": sheet.approximate,
                "comparable": sheet.comparable,
                "ours": sheet.ours,
                "unavailable": _unavailable(sheet, device, why),
            }
        )
    return rows


def render_listing(rows: list[dict[str, Any]], width: int) -> str:
    """The rows as text: a line of name and summary each, then what it takes, then why it cannot run here."""
    import textwrap

    lines = []
    for row in rows:
        mark = " (ours)" if row["ours"] else ""
        lines.append(f"{row['name']}{mark}: {row['summary']}")
        features = [word if cell == "yes" else f"{word} ({cell})" for word, cell in row["table"].items() if cell]
        takes = (
            f"{', '.join(row['directions'])}; {', '.join(row['dtypes'])}; D {row['head_dims']}; "
            f"{', '.join(features) or 'plain only'}"
        )
        lines += textwrap.wrap(takes, width - 1, initial_indent="    ", subsequent_indent="    ")
        lines += textwrap.wrap(_promises(row), width - 1, initial_indent="    ", subsequent_indent="    ")
        for reason in row["unavailable"]:
            lines += textwrap.wrap(f"not here: {reason}", width - 1, initial_indent="    ", subsequent_indent="      ")
    return "\n".join(line for text in lines for line in (textwrap.wrap(text, width - 1) if text[0] != " " else [text]))


def _promises(row: dict[str, Any]) -> str:
    """Where it runs, and what it promises beside right results."""
    promised = [
        sentence
        for holds, sentence in (
            (row["lse"], "lse"),
            (row["deterministic"], "the same result twice"),
            (row["torch_compile"], f"{row['torch_compile']} by torch.compile"),
            (row["cuda_graph"], "CUDA graph"),
        )
        if holds
    ]
    return "; ".join([row["hardware"], f"layouts {', '.join(row['layouts'])}", *promised])


def _device() -> tuple[Device | None, str | None]:
    try:
        return find_device(), None
    except DeviceError as error:
        return None, str(error).splitlines()[0]


def _unavailable(sheet: Sheet, device: Device | None, why: str | None) -> list[str]:
    reasons = [reason for reason in map(missing_package, sheet.packages) if reason]
    if device is None:
        return reasons or ([why] if why else [])
    return reasons + sheet.device_reasons(device)
