"""The codes of errors. `CKPT0412` has exit code 04, and is the twelfth cause of that; 00 is the general one.

codes.toml, beside this module, says of each code what it means, why it stops us and what to do: `ckpttool explain`
and docs/reference/codes.md show that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

__all__ = ["Code", "get_code_prefix", "load_codes"]

# fmt: off
Code = Literal[
    "CKPT0100", "CKPT0101", "CKPT0102", "CKPT0103", "CKPT0104",
    "CKPT0200", "CKPT0201", "CKPT0202", "CKPT0203", "CKPT0204",
    "CKPT0205", "CKPT0206", "CKPT0207", "CKPT0208", "CKPT0209", "CKPT0210", "CKPT0211", "CKPT0212", "CKPT0213",
    "CKPT0214", "CKPT0215", "CKPT0216", "CKPT0217", "CKPT0218", "CKPT0219", "CKPT0220", "CKPT0221", "CKPT0222",
    "CKPT0223", "CKPT0224", "CKPT0225", "CKPT0226", "CKPT0227",
    "CKPT0300", "CKPT0301", "CKPT0302", "CKPT0303", "CKPT0304", "CKPT0305", "CKPT0306",
    "CKPT0307", "CKPT0308", "CKPT0309", "CKPT0310", "CKPT0311", "CKPT0312", "CKPT0313", "CKPT0314", "CKPT0315",
    "CKPT0316", "CKPT0317", "CKPT0318", "CKPT0319", "CKPT0320", "CKPT0321", "CKPT0322", "CKPT0323", "CKPT0324",
    "CKPT0325", "CKPT0326", "CKPT0327", "CKPT0328", "CKPT0329", "CKPT0330", "CKPT0331", "CKPT0332", "CKPT0333",
    "CKPT0334", "CKPT0335", "CKPT0336", "CKPT0337", "CKPT0338", "CKPT0339", "CKPT0340", "CKPT0341", "CKPT0342",
    "CKPT0343", "CKPT0400", "CKPT0401",
    "CKPT0402", "CKPT0403", "CKPT0404", "CKPT0405", "CKPT0406", "CKPT0407", "CKPT0408", "CKPT0409", "CKPT0410",
    "CKPT0411", "CKPT0412", "CKPT0413", "CKPT0414", "CKPT0415", "CKPT0416", "CKPT0417", "CKPT0418", "CKPT0419",
    "CKPT0420", "CKPT0421", "CKPT0422", "CKPT0423", "CKPT0424", "CKPT0425", "CKPT0426", "CKPT0427", "CKPT0428",
    "CKPT0429", "CKPT0430", "CKPT0431", "CKPT0432", "CKPT0433",
    "CKPT0500", "CKPT0501", "CKPT0502", "CKPT0503", "CKPT0504", "CKPT0505", "CKPT0506", "CKPT0600", "CKPT0601",
    "CKPT0602", "CKPT0603", "CKPT0604", "CKPT0700", "CKPT0701", "CKPT0702", "CKPT0703", "CKPT0704", "CKPT0705",
    "CKPT0706", "CKPT0800", "CKPT0801", "CKPT0802", "CKPT0803", "CKPT0900", "CKPT0901", "CKPT0902", "CKPT0903",
    "CKPT0904", "CKPT0905", "CKPT0906", "CKPT0907", "CKPT0908", "CKPT1000", "CKPT1100", "CKPT1200", "CKPT1201",
    "CKPT1300", "CKPT1301", "CKPT1302", "CKPT1400", "CKPT1401", "CKPT1402", "CKPT9900",
]
# fmt: on


def get_code_prefix(exit_code: int) -> str:
    """Return the two digits after "CKPT" in the codes of an exit code: the exit code itself, 99 for 130.

    >>> get_code_prefix(4), get_code_prefix(130)
    ('04', '99')
    """
    return f"{min(exit_code, 99):02d}"


def load_codes() -> Mapping[str, Mapping[str, object]]:
    """Return {code: its entry}, in order: `title`, `means`, `why`, `do` (texts), `commands` (command lines that find
    out) and, where an error of the code is raised, an example of a `message`."""
    import tomllib
    from importlib.resources import files

    return tomllib.loads(files(__package__).joinpath("codes.toml").read_text(encoding="utf-8"))
