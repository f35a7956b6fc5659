"""The premises of a name map: the job's own arguments, where the checkpoint has them, compared with config.json and
with what the map is right for.

Arguments are Megatron-LM's `args` (extra.args), the model's config that NeMo 2 saves in context/model.yaml, and Meta's
params.json.
"""

from __future__ import annotations

import re
from typing import Any

from ... import bounded_json
from ...errors import CkpttoolError, Unsupported, argument
from ...huggingface import Config, maps
from ...index.checkpoint import Checkpoint
from ...index.expressions import evaluate, list_expression_keys
from ...index.name_maps import NameMap, Premise
from ...index.trees import nest
from ...printable import list_first
from ...storage.source import Source

__all__ = ["check_premises", "read_job_arguments"]

_SHOWN = 5
_MOST_BYTES = 4 << 20
_NEMO, _META = "context/model.yaml", "params.json"
_YAML = re.compile(r"^  (\w+): (\S.*)$", re.MULTILINE)


def read_job_arguments(ckpt: Checkpoint, source: Source) -> tuple[dict[str, Any], str]:
    """Read the arguments of the job that wrote a checkpoint.

    Returns:
        ({name: value}, where they are from, for messages); ({}, "") where there are none.
    """
    if ckpt.arguments:
        found = nest(ckpt.arguments)
        if found.get("group_query_attention") is False:  # then Megatron-LM does not look at the number of groups
            found["num_query_groups"] = found.get("num_attention_heads")
        return found, "the job (extra.args)"
    for name, parsed in ((_NEMO, _parse_nemo_config), (_META, _parse_meta_params)):
        if (
            source.exists(name)
            and source.size(name) <= _MOST_BYTES
            and (said := parsed(source.read_all(name, _MOST_BYTES), name))
        ):
            return said, name
    return {}, ""


def _parse_nemo_config(data: bytes, name: str) -> dict[str, object]:
    """Parse the scalars of `config` in the YAML that NeMo's io.dump writes, one line each and indented by two, and
    return {key: value}. `name` names the file in errors."""
    _, _, config = data.decode(errors="replace").partition("\nconfig:\n")
    out: dict[str, Any] = {}
    for m in _YAML.finditer(re.split(r"^\S", config, maxsplit=1, flags=re.MULTILINE)[0]):
        try:
            out[m[1]] = bounded_json.parse(m[2].encode(), name)
        except CkpttoolError:
            out[m[1]] = m[2].strip("'\"")
    return out


def _parse_meta_params(data: bytes, name: str) -> dict[str, object]:
    """Parse Meta's params.json and return its content; {} if the file is no params.json of Meta. `name` names the file
    in errors."""
    try:
        found = bounded_json.parse(data, name)
    except CkpttoolError:
        return {}
    return found if isinstance(found, dict) and {"dim", "n_layers"} <= found.keys() else {}


def check_premises(found: NameMap, job: tuple[Config, str], config: Config, given: str | None) -> list[str]:
    """Check the premises of a map, i.e. what must be true of the job and config.json for the map to be right.

    Args:
        found: the map.
        job: (the arguments of the job, where they are from), as `read_job_arguments` returns them.
        config: config.json of the text model; empty where there is none.
        given: the folder or id that the user named as the config; None for the config beside the source.

    Returns:
        Notes on premises that cannot be checked, since the job's arguments are unknown.

    Raises:
        Unsupported: the arguments contradict config.json, or a premise of the map.
    """
    arguments, where = job
    theirs = f"config.json ({argument('config', given)})" if given is not None else "config.json beside the source"
    wrong = [
        f"{_describe_side(p.job, arguments, where)}, and {_describe_side(p.config, config, theirs)}"
        for p in found.premises
        if _is_contradicted(p, arguments, config)
    ]
    kind = config.get("model_type")
    if found.models and isinstance(kind, str) and kind not in found.models:
        wrong.append(f"it is for model_type {', '.join(found.models)}, and {theirs} says {kind!r}")
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise Unsupported(
            f"the map {found.name} is not right for this model: {'; '.join(wrong[:_SHOWN])}{more}. The result would be "
            f"another model. Give {argument('config')} the config.json of the model that this job trained. If a "
            f"premise is wrong for your model code, give {argument('map')} a map of your own without it, or with lines "
            "for it"
            + (f": `ckpttool maps {found.name}` prints this one." if found.name in maps.list_map_names() else "."),
            code="CKPT0310",
        )
    if arguments:
        missing = _list_unknown_arguments(found, arguments)
    else:
        missing = [k for k in found.arguments if evaluate(k, arguments) is None]
    if not missing:
        return []
    shown = list_first(missing, _SHOWN)
    has = "the checkpoint has no arguments of the job" if not arguments else f"{where} does not say all"
    return [f"{has}, so it is not known whether the premises of the map {found.name} hold: {shown}"]


def _list_unknown_arguments(found: NameMap, arguments: Config) -> list[str]:
    """List the names of the job's arguments that the premises and conditions of a map need and that are missing.

    Args:
        found: the map.
        arguments: {name: value} of the arguments of the job.
    """
    asked = [p.job for p in found.premises if p.condition is None or evaluate(p.condition, arguments)]
    asked += [n.condition for n in found.lines if n.condition is not None]
    asked += [a.condition for a in found.added_one]
    return list(
        dict.fromkeys(k for text in asked if evaluate(text, arguments) is None for k in list_expression_keys(text)[:1])
    )


def _is_contradicted(premise: Premise, arguments: Config, config: Config) -> bool:
    """Tell whether a premise of a map applies and is wrong: both of its sides, that of the job and that of config.json,
    can be evaluated, and their values differ. False where one of them cannot be evaluated.

    Args:
        premise: the premise.
        arguments: {name: value} of the arguments of the job; {} if unknown.
        config: config.json of the text model.
    """
    if (not arguments and list_expression_keys(premise.job)) or (
        premise.condition is not None and not evaluate(premise.condition, arguments)
    ):
        return False
    job, other = evaluate(premise.job, arguments), evaluate(premise.config, config)
    return job is not None and other is not None and job != other


def _describe_side(expression: str, values: Config, where: str) -> str:
    """Return a clause that shows one side of a premise with the values of its keys: "config.json has vocab_size = 8".

    Args:
        expression: the side, an expression of keys.
        values: {key: value}; keys may be missing.
        where: names what the values are from.
    """
    known = [
        f"{k} = {evaluate(k, values)!r:.80}"
        for k in list_expression_keys(expression)
        if evaluate(k, values) is not None
    ]
    if not list_expression_keys(expression):
        return f"the map is right for {expression} only"
    return f"{where} {'has' if known else 'has none of'} {', '.join(known or list_expression_keys(expression))}"
