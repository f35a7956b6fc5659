"""How long an archive is kept: durations and dates, RETENTION.json, and S3's object lock.

    RETENTION.json   {"schema": "ckpttool.retention/1", "retain_until": TIME | null, "retain": as asked for | null,
                      "legal_hold": {"reason", "since": TIME} | null}

    TIME             UTC to the second, "2033-01-01T00:00:00Z"

Years and months are those of the calendar: a year after February 29 is February 28. The object lock is that of S3
("How S3 Object Lock works": a retention mode with a date, and a legal hold, which has no date).
"""

from __future__ import annotations

import calendar
import os
import re
from datetime import UTC, datetime, timedelta
from typing import Any

from .. import bounded_json
from ..errors import Corrupt, UsageError, argument

__all__ = [
    "SCHEMA",
    "decode_retention",
    "encode_retention",
    "format_time",
    "get_current_user",
    "make_object_lock_arguments",
    "parse_age",
    "parse_retention",
    "parse_time",
]

SCHEMA = "ckpttool.retention/1"
_LONG, _SHORT = re.compile(r"([0-9]{1,6})([dwmy])"), re.compile(r"([0-9]{1,6})([hdwmy])")
_HOURS = {"h": 1, "d": 24, "w": 24 * 7, "m": 24 * 31, "y": 24 * 366}


def format_time(time: datetime) -> str:
    """Return a time as text in the format of all records: UTC, "2033-01-01T00:00:00Z", fractions of a second rounded
    up."""
    time = time.astimezone(UTC)
    if time.microsecond:
        time = time.replace(microsecond=0) + timedelta(seconds=1)
    return f"{time:%Y-%m-%dT%H:%M:%SZ}"


def get_current_user() -> str:
    """Return the name of the current user, which ledger entries and other records state; the user ID as text if the
    user has no name."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return str(os.getuid())


def parse_time(text: str) -> datetime:
    """Return the time that a text in the format of `format_time` states, with its time zone, UTC.

    Raises:
        ValueError: it is not in this format.
    """
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", text, re.ASCII):
        raise ValueError(f"{text!r} is not a UTC time like 2033-01-01T00:00:00Z")
    return datetime.fromisoformat(text)


def parse_retention(text: str, start: datetime) -> datetime:
    """Return when a retention that begins at `start` ends, in UTC.

    Args:
        text: "7y", "18m" (months), "2w", "90d", a date or an ISO time (UTC without a time zone).

    Raises:
        UsageError: `text` is none of these, or the end has passed.
    """
    try:
        if found := _LONG.fullmatch(text):
            end = _add_duration(start, int(found[1]), found[2])
        else:
            end = datetime.fromisoformat(text)
            end = (end.replace(tzinfo=UTC) if end.tzinfo is None else end).astimezone(UTC)
            format_time(end)  # rounds up, and there is no year 10000
    except (ValueError, OverflowError):
        raise UsageError(
            f"{text!r} is not a retention period; give 7y, 18m (months), 2w, 90d or a date like 2033-01-01.",
            code="CKPT0203",
        ) from None
    if end <= start:
        raise UsageError(
            f"The retention ends at {format_time(end)}, which has passed; it is {format_time(start)}.", code="CKPT0203"
        )
    return end


def _add_duration(start: datetime, n: int, unit: str) -> datetime:
    """Return `start` plus `n` days ("d"), weeks ("w"), months ("m") or years ("y") of the calendar, in UTC.

    Raises:
        OverflowError: that is after the year 9999.
    """
    start = start.astimezone(UTC)
    if unit in "dw":
        return start + timedelta(hours=n * _HOURS[unit])
    months = start.year * 12 + start.month - 1 + n * (12 if unit == "y" else 1)
    year, month = divmod(months, 12)
    if year > 9999:
        raise OverflowError
    return start.replace(year=year, month=month + 1, day=min(start.day, calendar.monthrange(year, month + 1)[1]))


def parse_age(text: str) -> timedelta:
    """Return the duration that a text states: "12h", "90d", "2w", "18m" (months of 31 days), "7y" (years of 366).

    Raises:
        UsageError: it is none of these, or zero.
    """
    found = _SHORT.fullmatch(text)
    if not found or not int(found[1]):
        raise UsageError(f"{text!r} is not an age; give 12h, 90d, 2w, 18m (months) or 7y.", code="CKPT0203")
    return timedelta(hours=int(found[1]) * _HOURS[found[2]])


def encode_retention(retain: str | None, hold: str | None, start: datetime) -> bytes | None:
    """Return the content of RETENTION.json; None if there is neither a retention nor a hold.

    Args:
        retain: how long to keep the archive, as `parse_retention` takes it; None: not said.
        hold: the reason of a legal hold; None: there is none.
        start: when both begin.

    Raises:
        UsageError: the retention is invalid, or the hold has no reason.
    """
    if retain is None and hold is None:
        return None
    if hold is not None and not hold.strip():
        raise UsageError(f"A legal hold needs a reason: {argument('hold')} must not be empty.", code="CKPT0202")
    parsed = {
        "schema": SCHEMA,
        "retain_until": format_time(parse_retention(retain, start)) if retain is not None else None,
        "retain": retain,
        "legal_hold": {"reason": hold, "since": format_time(start)} if hold is not None else None,
    }
    return bounded_json.encode(parsed, indent=1) + b"\n"


def decode_retention(data: bytes, what: str) -> dict[str, object]:
    """Return the content of RETENTION.json: {"schema", "retain_until", "retain", "legal_hold"}, checked.

    Args:
        what: the path, for messages.

    Raises:
        Corrupt, Unsafe: it is not what `encode_retention` writes.
    """
    parsed = bounded_json.parse(data, what)
    if not isinstance(parsed, dict) or parsed.get("schema") != SCHEMA:
        raise Corrupt(f"{what} is of another schema than {SCHEMA!r}.", code="CKPT0425")
    try:
        until, retain, hold = parsed["retain_until"], parsed["retain"], parsed["legal_hold"]
        if set(parsed) != {"schema", "retain_until", "retain", "legal_hold"} or (until is None) != (retain is None):
            raise ValueError("its fields")
        if until is not None:
            parse_time(until)
        if retain is not None and not isinstance(retain, str):
            raise ValueError("retain")
        if hold is not None:
            if set(hold) != {"reason", "since"} or not isinstance(hold["reason"], str) or not hold["reason"].strip():
                raise ValueError("legal_hold")
            parse_time(hold["since"])
    except (LookupError, TypeError, ValueError) as e:
        raise Corrupt(f"{what} is damaged: {e}.", code="CKPT0425") from None
    return parsed


def make_object_lock_arguments(retention: dict[str, Any] | None, mode: str = "GOVERNANCE") -> dict[str, object]:
    """Return the arguments of S3's put_object that lock an object until its retention ends, and set its legal hold.

    {} if the archive has neither.

    Args:
        retention: the content of RETENTION.json; None if there is none.
        mode: "GOVERNANCE" or "COMPLIANCE", which nobody can shorten.
    """
    out: dict[str, Any] = {}
    if retention and retention["retain_until"]:
        out |= {"ObjectLockMode": mode, "ObjectLockRetainUntilDate": parse_time(retention["retain_until"])}
    if retention and retention["legal_hold"]:
        out["ObjectLockLegalHoldStatus"] = "ON"
    return out
