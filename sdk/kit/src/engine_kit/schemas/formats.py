"""The `format` of texts, as patterns: one meaning for all grammar drivers. The words are those of JSON Schema 2020-12.

What a pattern cannot say is left out, to the strict side: a time has no leap second, and a host's name no Unicode.
"""

from __future__ import annotations

from collections.abc import Mapping

_HOUR, _SIXTY = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = f"{_HOUR}:{_SIXTY}:{_SIXTY}(?:\\.[0-9]{{1,9}})?(?:[Zz]|[+-]{_HOUR}:{_SIXTY})"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"{_BYTE}(?:\\.{_BYTE}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [
        f"(?:{_GROUP}:){{7}}{_GROUP}",
        f"(?:{_GROUP}:){{6}}{_IPV4}",
        # "::" stands for one group or more: so many before it, and at most so many behind
        *(
            f"(?:{_GROUP}(?::{_GROUP}){{{before - 1}}})?::(?:(?:{_GROUP}:){{0,{6 - before}}}{_GROUP})?"
            if before
            else f"::(?:(?:{_GROUP}:){{0,6}}{_GROUP})?"
            for before in range(7)
        ),
        f"{_GROUP}(?::{_GROUP}){{6}}::",
        *(
            f"(?:{_GROUP}(?::{_GROUP}){{{before - 1}}})::(?:{_GROUP}:){{0,{5 - before}}}{_IPV4}"
            if before
            else f"::(?:{_GROUP}:){{0,5}}{_IPV4}"
            for before in range(6)
        ),
    ]
)
_ANY, _END = "[A-Za-z0-9-]", "[A-Za-z0-9]"
# no hyphens as third and fourth character, which is the mark of Unicode; and at most 41 characters, so that the most
# labels that are taken, six, have no more than 253
_LABEL = f"{_END}(?:{_END}|{_ANY}{_END}|{_ANY}{{2}}{_END}|{_ANY}(?:{_END}{_ANY}|-{_END}){_ANY}{{0,36}}{_END})?"
_HOSTNAME = f"{_LABEL}(?:\\.{_LABEL}){{0,5}}"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_HEX = "[0-9A-Fa-f]"
_ESCAPED = f"%{_HEX}{{2}}"
_PCHAR = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_ESCAPED})"
_AUTHORITY = f"(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|{_ESCAPED})*@)?(?:[A-Za-z0-9._~!$&'()*+,;=-]|{_ESCAPED})*(?::[0-9]*)?"
_TAIL = f"(?:\\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_ABSOLUTE = f"(?://{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?"
_URI = f"[A-Za-z][A-Za-z0-9+.-]*:{_ABSOLUTE}|{_PCHAR}+(?:/{_PCHAR}*)*)?{_TAIL}"
_NO_COLON = f"(?:[A-Za-z0-9._~!$&'()*+,;=@-]|{_ESCAPED})"
_RELATIVE = f"{_ABSOLUTE}|{_NO_COLON}+(?:/{_PCHAR}*)*)?{_TAIL}"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_SECONDS = "[0-9]+S"
_CLOCK = f"T(?:[0-9]+H(?:[0-9]+M(?:{_SECONDS})?)?|[0-9]+M(?:{_SECONDS})?|{_SECONDS})"
_CALENDAR = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"

FORMATS: Mapping[str, str] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "duration": f"^P(?:{_CALENDAR}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)$",
    "email": f"^{_ATOM}(?:\\.{_ATOM})*@{_HOSTNAME}$",
    "hostname": f"^{_HOSTNAME}$",
    "ipv4": f"^{_IPV4}$",
    "ipv6": f"^(?:{_IPV6})$",
    "uuid": f"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
    "uri": f"^{_URI}$",
    "uri-reference": f"^(?:{_URI}|{_RELATIVE})$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
}
"""By name, the pattern."""
