"""blame: from checks that failed to what is likely wrong, in words, most likely first.

    causes(reference, got, checks, opened)

What is exact comes first: a tensor that is missing, a fingerprint that is that of another tensor, an option, a learning
rate, a batch that the reference had in another step. What numbers of steps suggest is said only where nothing exact
explains it. With both checkpoints open (the reference's first) some of the differing tensors are read, and how they
differ is named, with the file, the bytes and the rank of the first difference. A cause is never made up: where nothing
fits, the one cause is "unknown", with what was seen.
"""



def causes(
    reference: Trace | None, got: Trace, checks: Sequence[Check], opened: tuple[Opened, Opened] | None = None
) -> list[Cause]:
    """What is likely wrong, most likely first; nothing where no check of continuity failed.

    Args:
        reference, got, checks: as `judge` had and gave them.
        opened: the checkpoints that the two traces are of, the reference's first.
    """
    failed = {c.name: c for c in checks if c.verdict == "fail" and c.stage != "gate"}
    if not failed:
        return []
    finder = _Finder(reference, got, {c.name: c for c in checks}, failed, opened)
    out = finder.all()
    return out or [
        Cause(
            "unknown", f"no known fault looks like this: {listed(failed)} failed",
            [f"{c.name}: {c.text}" for c in failed.values()],
        )
    ]  # fmt: skip


class _Finder:
    """Looks for causes; `explained` has what earlier ones account for: "weights", "optimizer", "data", "rates"."""

    def __init__(
        self,
        reference: Trace | None,
        got: Trace,
        checks: Mapping[str, Check],
        failed: Mapping[str, Check],
        opened: tuple[Opened, Opened] | None,
    ) -> None:
        self.reference, self.got, self.checks, self.failed, self.opened = reference, got, checks, failed, opened
        self.explained: set[str] = set()
        self.out: list[Cause] = []

    def all(self) -> list[Cause]:
        """Every cause, most likely first."""
        self.load()
        if self.reference is not None:
            if state_obstacle(self.reference, self.got) is None:
                self.names(self.reference)
                self.shapes(self.reference)
                self.state(self.reference)
            if self.got.failed is not None and self.out:
                self.out.append(self.out.pop(0))  # what is missing or has another shape says more
            self.tied()
            self.model(self.reference)
            if "config.scheduler" in self.failed:  # the learning rates in the groups follow from it
                self.scheduler(self.reference)
                self.groups(self.reference)
            else:
                self.groups(self.reference)
                self.scheduler(self.reference)
            self.values(self.reference)
            self.data(self.reference)
        self.plausible()
        self.not_finite()
        if self.reference is not None:
            self.gradients_summed(self.reference)
            self.dynamic(self.reference)
        self.ranks()
        self.run()
        self.round_trip()
        return self.out

    def add(
        self,
        kind: str,
        text: str,
        evidence: Sequence[str] = (),
        tensors: Sequence[str] = (),
        place: str | None = None,
        explains: Iterable[str] = (),
    ) -> Cause:
        self.explained.update(explains)
        cause = Cause(kind, text, list(evidence), list(tensors), place)
        self.out.append(cause)
        return cause

    def passed(self, name: str) -> bool:
        return name in self.checks and self.checks[name].verdict == "pass"

    def seen(self, *names: str) -> list[str]:
        return [f"{n}: {self.failed[n].text}" for n in names if n in self.failed]

    # ---------------------------------------------------------------------------------------------------------- state

    def load(self) -> None:
        got = self.got
        if got.failed is not None:
            self.add(
                "load-failed", f"the checkpoint could not be loaded: {got.failed}", explains=("weights", "optimizer")
            )
            return
        copies = [str(n) for n in got.environment.get("copies_differ") or []]
        if copies:
            self.add(
                "copies-differ", f"ranks that should hold the same {plural(len(copies), 'tensor')} do not, first "
                f"{spoken(copies[0])}", self.seen("state.loaded"), copies, explains=("weights", "optimizer"),
            )  # fmt: skip
            return
        wrong = [
            n for n, mark in got.stored.items() if n not in got.state or (got.state[n][2] and got.state[n][2] != mark)
        ]
        if not wrong:
            return
        holders: dict[str, list[str]] = {}
        for n, mark in got.stored.items():
            holders.setdefault(mark, []).append(n)
        evidence = self.seen("state.loaded")
        for n in wrong[:4]:
            from_ = holders.get(got.state[n][2], []) if n in got.state else []
            if len(from_) == 1 and prod(got.state[n][1]) > 1:
                evidence.append(f"{n} holds what the files have for {from_[0]}")
        text = f"loading changed {plural(len(wrong), 'tensor')}: the job holds something else than the files"
        explains = {"weights" if slot_of(n) == "weights" else "optimizer" for n in wrong}
        self.add("loading", text, evidence, wrong, explains=explains)

    def names(self, reference: Trace) -> None:
        if not reference.state or (not self.got.state and self.got.failed is None):
            return
        missing, extra = missing_and_extra(reference, self.got)
        evidence = self.seen("state.names")
        theirs = {n for n in reference.state if n.startswith("optim.state.")}
        ours = {n for n in self.got.state if n.startswith("optim.state.")}
        members, known = options(self.got), options(reference)
        gone = [n for n in missing if n.startswith("optim.state.")]
        # what this optimizer does not train has no state in it; `groups` says that
        gone = [n for n in gone if not members or fqn_of(n) in members or fqn_of(n) not in known]
        if theirs and not ours:
            self.add(
                "optimizer-missing", "the checkpoint has no optimizer state: moments and steps would begin anew",
                evidence, gone, explains=("optimizer",),
            )  # fmt: skip
            gone = []
        if gone:
            params = list(dict.fromkeys(fqn_of(n) for n in gone))
            whole = [p for p in params if not any(fqn_of(n) == p for n in ours)]
            slots = sorted({slot_of(n) for n in gone})
            if len(whole) == len(params):
                text = (
                    f"the optimizer's state of {plural(len(params), 'parameter')} is missing, first {spoken(params[0])}"
                )
            else:
                text = f"{' and '.join(slots)} of {plural(len(params), 'parameter')} missing, first {spoken(params[0])}"
            self.add("moments-missing", text, evidence, gone, explains=("optimizer",))
        weights = [n for n in missing if not n.startswith("optim.")]
        if weights:
            every = [n for n in reference.state if not n.startswith("optim.")]
            text = (
                f"{scope(weights, every, 'weights')} not in the checkpoint: a new job would begin with random values"
            )
            self.add("tensor-missing", text, evidence, weights, explains=("weights",))
        strange = [n for n in extra if not n.startswith("optim.state.")] or extra
        if extra and not missing:
            self.add(
                "tensor-extra",
                f"{plural(len(extra), 'tensor')} that the reference does not have, first {spoken(strange[0])}",
                evidence,
                extra,
            )

    def shapes(self, reference: Trace) -> None:
        common = [n for n in reference.state if n in self.got.state]
        rows: dict[tuple[Any, Any], list[str]] = {}
        dtypes: dict[tuple[str, str], list[str]] = {}
        for n in common:
            (d, s, _), (e, t, _) = reference.state[n], self.got.state[n]
            if tuple(s) != tuple(t):
                rows.setdefault((tuple(s), tuple(t)), []).append(n)
            elif d != e:
                dtypes.setdefault((d, e), []).append(n)
        for (s, t), names in rows.items():
            text = f"{scope(names, common, 'tensors')}: shape {list(t)} instead of {list(s)}"
            kind = "shape"
            if t == s[::-1]:
                kind, text = "transposed", text + ", as of the transposed tensor"
            elif s[1:] == t[1:] and re.search(r"embed|lm_head|wte|output", names[0]):
                kind = "vocabulary"
                text += f": the vocabulary was {'padded' if t[0] > s[0] else 'cut'} by {abs(t[0] - s[0])} rows"
            self.add(kind, text, self.seen("state.shapes"), names, explains=("weights", "optimizer"))
        if "state.shapes" in self.failed:
            for (d, e), names in dtypes.items():
                text = f"{scope(names, common, 'tensors')}: {e} instead of {d}"
                self.add("dtype", text, self.seen("state.shapes"), names, explains={component_of(n) for n in names})

    def state(self, reference: Trace) -> None:
        if self.got.failed is not None:
            return
        wrong = differing(reference, self.got)
        marked = {fqn_of(n) for n in wrong if is_step(n)}
        theirs, ours = steps_of(reference), steps_of(self.got)
        steps = {n: (theirs[n], ours[n]) for n in theirs if n in ours and theirs[n] != ours[n]}
        rest = [n for n in wrong if not (is_step(n) and (fqn_of(n) in steps or prod(reference.state[n][1]) == 1))]
        rest = self.moved(reference, rest)
        rest = self.steps(reference, steps, rest)
        strange = [n for n in wrong if is_step(n) and fqn_of(n) in marked - set(steps) and n not in rest]
        self.values_differ(reference, rest + strange)

    def moved(self, reference: Trace, wrong: list[str]) -> list[str]:
        """Tensors that hold the bytes of others; the ones that do not are given back."""
        holders: dict[str, list[str]] = {}
        for n, (_, shape, mark) in reference.state.items():
            if prod(shape) > 1 and mark:
                holders.setdefault(mark, []).append(n)
        tied = [set(g) for g in reference.tied]
        moves: dict[str, str] = {}
        for n in wrong:
            found = holders.get(self.got.state[n][2], []) if prod(self.got.state[n][1]) > 1 else []
            if len(found) == 2 and any({fqn_of(found[0]), fqn_of(found[1])} <= g for g in tied):
                found = found[:1]
            if len(found) == 1:  # bytes that several have are a constant, and tell nothing
                moves[n] = found[0]
        left = dict(moves)
        self._slots_exchanged(left)
        self._layers(reference, left)
        self._leaves(left)
        for a, b in left.items():
            both = left.get(b) == a
            if both and a > b:
                continue
            text = (
                f"{spoken(a)} and {spoken(b)} are exchanged" if both else f"{spoken(a)} holds the bytes of {spoken(b)}"
            )
            evidence = [f"{a} has the fingerprint that {b} has in the reference"]
            self.add("exchanged" if both else "copied", text, evidence, [a, b], explains=(component_of(a),))
        return [n for n in wrong if n not in moves]

    def _slots_exchanged(self, left: dict[str, str]) -> None:
        """Moments under each other's names."""
        pairs_ = {a: b for a, b in left.items() if fqn_of(a) == fqn_of(b) and slot_of(a) != slot_of(b)}
        for two in sorted({tuple(sorted((slot_of(a), slot_of(b)))) for a, b in pairs_.items()}):
            names = [a for a, b in pairs_.items() if tuple(sorted((slot_of(a), slot_of(b)))) == two]
            params = list(dict.fromkeys(fqn_of(n) for n in names))
            of = f"of {plural(len(params), 'parameter')}, first {spoken(params[0])}"
            both = sum(pairs_.get(pairs_[a]) == a for a in names) == len(names)
            if both:
                text = f"{two[0]} and {two[1]} are exchanged, {of}"
            else:
                text = f"{slot_of(names[0])} holds {slot_of(pairs_[names[0]])}, {of}"
            evidence = [f"{names[0]} has the fingerprint that {pairs_[names[0]]} has in the reference"]
            self.add("moments-exchanged" if both else "moments-copied", text, evidence, names, explains=("optimizer",))
        for a in pairs_:
            del left[a]

    def _layers(self, reference: Trace, left: dict[str, str]) -> None:
        """Layers in another order: the same names but for the number, of at least half of the layer's tensors."""
        by: dict[tuple[int, int], list[str]] = {}
        for a, b in left.items():
            i, j = layer_of(a), layer_of(b)
            if i is not None and j is not None and i != j and LAYER.sub(".#.", a, 1) == LAYER.sub(".#.", b, 1):
                by.setdefault((i, j), []).append(a)
        sizes = Counter((layer_of(n), component_of(n)) for n in reference.state if not is_step(n))
        order: dict[int, int] = {}
        names: list[str] = []
        for (i, j), group in by.items():
            for component in ("weights", "optimizer"):
                part = [n for n in group if component_of(n) == component]
                if len(part) > 1 and len(part) * 2 >= sizes[i, component] and order.get(i, j) == j:
                    order[i] = j
                    names += part
        if not order:
            return
        for n in names:
            left.pop(n)
        kinds = kinds(names)
        swapped = [(i, j) for i, j in sorted(order.items()) if i < j and order.get(j) == i]
        if len(swapped) * 2 == len(order):
            text = " and ".join(f"layers {i} and {j}" for i, j in swapped[:4]) + f" are exchanged ({kinds})"
        else:
            what = ", ".join(f"layer {i} holds layer {j}" for i, j in sorted(order.items())[:4])
            text = f"layers are in another order ({kinds}): {what}"
            every = sorted({i for n in reference.state if (i := layer_of(n)) is not None})
            if all(order.get(i, i) == j for i, j in zip(every, sorted(every, key=str), strict=True)):
                text += "; it is the order of their numbers as words"
        evidence = [f"{plural(len(names), 'tensor')} with the fingerprint of the same tensor of another layer"]
        self.add("layers-exchanged", text, evidence, names, explains={component_of(n) for n in names})

    def _leaves(self, left: dict[str, str]) -> None:
        """Two parameters of one module under each other's names: q and k, gate and up."""
        by: dict[tuple[str, str], list[str]] = {}
        for a, b in left.items():
            if slot_of(a) != slot_of(b) or layer_of(a) != layer_of(b):
                continue
            p, q = fqn_of(a).split("."), fqn_of(b).split(".")
            apart = [k for k in range(len(p)) if len(p) == len(q) and p[k] != q[k]]
            if len(apart) == 1 and left.get(b) == a:
                two = sorted((p[apart[0]], q[apart[0]]))
                by.setdefault((two[0], two[1]), []).append(a)
        for (x, y), names in by.items():
            layers = sorted({i for n in names if (i := layer_of(n)) is not None})
            inside = f" in layer{'s' if len(layers) > 1 else ''} {listed(map(str, layers), 6)}" if layers else ""
            text = f"{x} and {y} are exchanged{inside} ({kinds(names)})"
            evidence = [f"{names[0]} has the fingerprint that {left[names[0]]} has in the reference"]
            self.add("exchanged", text, evidence, names, explains={component_of(n) for n in names})
        for n in {n for names in by.values() for n in names}:
            left.pop(n)

    def steps(self, reference: Trace, steps: Mapping[str, tuple[float, float]], rest: list[str]) -> list[str]:
        """The optimizer's step, and state of another step; tensors that this does not explain are given back."""
        if not steps:
            return rest
        names = [f"optim.state.{n}.step" for n in steps]
        every = [n for n in steps_of(reference) if n in steps_of(self.got)]
        where = (
            "on all tensors"
            if len(steps) == len(every)
            else f"on {len(steps)} of {len(every)} tensors, first {spoken(next(iter(steps)))}"
        )
        moments = {fqn_of(n) for n in rest if n.startswith("optim.state.")}
        evidence = self.seen("state.scalars")
        if all(b == 0 for _, b in steps.values()):
            also = (
                "the moments were restored, the step was not"
                if not moments & set(steps)
                else "the moments are others, too"
            )
            self.add(
                "step-reset", f"the optimizer's step is 0 {where}: {also}", evidence, names, explains=("optimizer",)
            )
            return rest
        gaps = {b - a for a, b in steps.values()}
        if len(gaps) > 1:
            self.add(
                "step-differs", f"the optimizer's steps are others {where}", evidence, names, explains=("optimizer",)
            )
            return rest
        gap = int(gaps.pop())
        far = f"{plural(abs(gap), 'step')} {'earlier' if gap < 0 else 'later'}"
        if len(moments & set(steps)) * 10 < len(steps) * 9:
            self.add(
                "step-offset", f"the optimizer's step is {abs(gap)} {'less' if gap < 0 else 'more'} {where}; the "
                "moments are those of the reference", evidence, names, explains=("optimizer",),
            )  # fmt: skip
            return rest
        weights = [n for n in rest if component_of(n) == "weights"]
        universe = [n for n in reference.state if component_of(n) == "weights"]
        old = [n for n in rest if n.startswith("optim.state.") and fqn_of(n) in steps]
        if len(weights) * 10 >= len(universe) * 9:
            text = f"weights and optimizer state are those of another checkpoint, {far}"
            self.add("other-checkpoint", text, evidence, [*weights, *old], explains=("weights", "optimizer"))
            return [n for n in rest if n not in set(weights) | set(old)]
        layers = {layer_of(n) for n in old}
        part = (
            ""
            if len(steps) == len(every)
            else f" of layer {layers.pop()}"
            if len(layers) == 1 and None not in layers
            else f" of {plural(len(steps), 'parameter')}"
        )
        text = f"the optimizer's state{part} is that of another step, {far}"
        self.add("optimizer-stale", text, evidence, old, explains=("optimizer",))
        return [n for n in rest if n not in set(old)]

    def values_differ(self, reference: Trace, rest: list[str]) -> None:
        """What differs and is not the bytes of another tensor; looked into where both checkpoints are open."""
        if not rest:
            return
        looked = _look(self.opened, rest) if self.opened is not None else {}
        by: dict[str, list[str]] = {}
        for n, found in looked.items():
            by.setdefault(found.kind if isinstance(found, Likeness) else "", []).append(n)
        equal = by.pop("", [])
        left = [n for n in rest if n not in looked]
        for kind, names in by.items():
            first = looked[names[0]]
            assert isinstance(first, Likeness)
            # others of the same slot that were not read are most likely of the kind, where all that were read are
            slots = {slot_of(n) for n in names}
            others = {found.kind if found else "" for n, found in looked.items() if slot_of(n) in slots}
            alone = others == {kind}
            more = [n for n in left if slot_of(n) in slots] if alone else []
            left = [n for n in left if n not in set(more)]
            every = [n for n in reference.state if slot_of(n) in slots]
            what = (
                "tensors" if len(slots) > 1 else "weights" if slots == {"weights"} else f"{next(iter(slots))} tensors"
            )
            texts = {found.text for n in names if isinstance(found := looked[n], Likeness)}
            scope = scope(names + more, every, what)
            said = first.text if len(names) == 1 or len(texts) == 1 else _general(kind, first.text)
            if len(names) + len(more) > 1:
                said = re.sub(
                    r"^(holds|is|has|differs)",
                    lambda m: {"holds": "hold", "is": "are", "has": "have", "differs": "differ"}[m[1]],
                    said,
                )
            evidence = [f"{n}: {found.text}" for n in names if isinstance(found := looked[n], Likeness)]
            if more:
                evidence.append(f"{plural(len(more), 'tensor')} of the same kind differ and were not read")
            place = self._place(names[0], first)
            self.add(kind, f"{scope} {said}", evidence, names + more, place, {component_of(n) for n in names})
        if equal:
            text = (
                f"{scope(equal, rest, 'tensors')}: equal in both checkpoints' files, not in the jobs: loading did it"
            )
            self.add("loading", text, self.seen("state.digests"), equal, explains={component_of(n) for n in equal})
        for component, kind in (("weights", "weights-differ"), ("optimizer", "moments-differ")):
            names = [n for n in left if component_of(n) == component]
            if not names:
                continue
            every = [n for n in reference.state if component_of(n) == component and not is_step(n)]
            what = "weights" if component == "weights" else "tensors of the optimizer"
            slots = {slot_of(n) for n in names}
            if component == "optimizer" and len(slots) == 1:
                what = f"{next(iter(slots))} tensors of the optimizer"
                every = [n for n in every if slot_of(n) in slots]
            text = (
                f"{scope(names, every, what)} hold{'s' if len(names) == 1 else ''} other values than the reference's"
            )
            self.add(kind, text, self.seen("state.digests"), names, explains=(component,))

    def _place(self, name: str, found: Likeness) -> str | None:
        if self.opened is None:
            return None
        return place_of(self.opened[1].locate(), name, found.first)

    # -------------------------------------------------------------------------------------------------- configuration

    def tied(self) -> None:
        check = self.failed.get("config.tied")
        if check is not None:
            names = [check.where] if check.where else []
            self.add(
                "untied", f"{check.text}: they get gradients and updates apart", self.seen("config.tied"), names,
                explains=("weights", "optimizer"),
            )  # fmt: skip

    def model(self, reference: Trace) -> None:
        if "config.model" not in self.failed or reference.config is None or self.got.config is None:
            return
        found = config_differences(reference.config, self.got.config)
        told = [f"{k} is {b!r} and was {a!r}" for k, (a, b) in found.items()]
        text = f"the model is configured otherwise: {listed(told)}"
        self.add("model-configuration", text, self.seen("probe.logits", "step1.loss"), explains=("weights",))

    def groups(self, reference: Trace) -> None:
        if "config.groups" not in self.failed:
            return
        found, missing, extra = option_differences(reference, self.got)
        known = options(self.got)
        for key, where in found.items():
            if key in ("lr", "initial_lr") and "rates" in self.explained:
                continue
            by: dict[str, list[str]] = {}
            for n, two in where.items():
                by.setdefault(repr(two), []).append(n)
            for names in by.values():
                a, b = where[names[0]]
                scope = (
                    "all parameters"
                    if len(names) == len(known)
                    else f"{plural(len(names), 'parameter')}, first {names[0]}"
                )
                text, kind = f"{key} is {b!r} and was {a!r} for {scope}", f"option-{key.replace('_', '-')}"
                if key == "weight_decay" and a == 0 and b and all(_undecayed(n) for n in names):
                    kind = "weight-decay-on-norms"
                    what = "1 norm or bias" if len(names) == 1 else f"{len(names)} norms and biases"
                    text = f"weight decay ({b!r}) is applied to {what} that had none, first {names[0]}"
                if key == "betas" and b in ((0.9, 0.999), [0.9, 0.999]):
                    text += ", which is the default of AdamW"
                explains = ("optimizer", "rates") if key in ("lr", "initial_lr") else ("optimizer",)
                self.add(kind, text, self.seen("config.groups"), names, explains=explains)
        if missing:
            text = f"{plural(len(missing), 'parameter')} not in the optimizer and not trained, first {missing[0]}"
            self.add("optimizer-members", text, self.seen("config.groups"), missing, explains=("optimizer",))
        if extra:
            text = f"{plural(len(extra), 'parameter')} that the reference's optimizer does not have, first {extra[0]}"
            self.add("optimizer-members", text, self.seen("config.groups"), extra, explains=("optimizer",))

    def scheduler(self, reference: Trace) -> None:
        evidence = self.seen("config.scheduler", "step1.learning_rates", "steps.learning_rates")
        if "config.scheduler" in self.failed:
            found, missing, extra, compared = value_differences(reference, self.got, "scheduler")
            if missing and not compared and not extra:
                self.add(
                    "scheduler-missing",
                    "the checkpoint has no state of the scheduler",
                    evidence,
                    explains=("rates", "optimizer"),
                )
                return
            epochs = [two for n, two in found.items() if n.rpartition(".")[2] == "last_epoch"]
            if epochs:
                a, b = epochs[0]
                if b == 0:
                    kind, text = "scheduler-reset", f"the scheduler begins anew: its last_epoch is 0 and was {a}"
                else:
                    kind, text = (
                        "scheduler-offset",
                        f"the scheduler is off by {b - a:+d}: its last_epoch is {b} and was {a}",
                    )
            else:
                told = [f"{n} is {b!r} and was {a!r}" for n, (a, b) in found.items()]
                kind, text = "scheduler-state", f"the scheduler has another state: {listed(told)}"
            self.add(kind, text, evidence, explains=("rates", "optimizer"))
            return
        if not evidence or "rates" in self.explained:
            return
        kind, text = _rates(reference, self.got)
        self.add(kind, text, evidence, explains=("rates", "optimizer"))

    def values(self, reference: Trace) -> None:
        if "config.values" not in self.failed:
            return
        if reference.clip is not None and self.got.clip != reference.clip:
            now = "off" if self.got.clip is None else f"at {self.got.clip!r}"
            text = (
                f"gradient clipping is {now} and was at {reference.clip!r}; it acts once the grad norm is beyond that"
            )
            self.add("clipping", text, self.seen("config.values"), explains=("optimizer",))
        found, missing, _, _ = value_differences(reference, self.got, "trainer")
        told = [f"{n} is {b!r} and was {a!r}" for n, (a, b) in found.items()]
        told += [f"{n} is missing" for n in missing]
        if told:
            self.add("counters", f"the trainer would count otherwise: {listed(told)}", self.seen("config.values"))
        told = []
        for component in ("scaler", "dataloader", "extra"):
            found, _, _, _ = value_differences(reference, self.got, component)
            told += [f"{n} is {b!r} and was {a!r}" for n, (a, b) in found.items()]
        if told:
            self.add("values", f"other values are in the checkpoint: {listed(told)}", self.seen("config.values"))

    # ----------------------------------------------------------------------------------------------------------- data

    def data(self, reference: Trace) -> None:
        if "step1.batch" not in self.failed and "steps.batch" not in self.failed:
            return
        evidence = self.seen("step1.batch", "steps.batch")
        a, b = reference, self.got
        if None not in (a.global_batch, b.global_batch) and a.global_batch != b.global_batch:
            text = f"the global batch is {b.global_batch} and was {a.global_batch}"
            self.add("global-batch", text, evidence, explains=("data",))
            return
        if None not in (a.sequence, b.sequence) and a.sequence != b.sequence:
            self.add(
                "sequence",
                f"sequences are {b.sequence} tokens long and were {a.sequence}",
                evidence,
                explains=("data",),
            )
            return
        wrong = [(x, y) for x, y in pairs(a, b) if None not in (x.batch, y.batch) and x.batch != y.batch]
        tokens = [(x.tokens, y.tokens) for x, y in wrong if x.tokens and y.tokens and x.tokens != y.tokens]
        if tokens and len(tokens) == len(wrong):
            ratio = tokens[0][1] / tokens[0][0]
            text = f"a step has {tokens[0][1]} tokens and had {tokens[0][0]} ({ratio:.3g} times): another global batch"
            self.add("global-batch", text, evidence, explains=("data",))
            return
        of: dict[str, int] = {}
        for s in a.steps:
            if s.batch is not None:
                of.setdefault(s.batch, s.step)
        gaps = Counter(of[y.batch] - y.step for _, y in wrong if y.batch in of)
        if not gaps:
            first = wrong[0][1].step if wrong else b.start + 1
            text = f"the data is other data, from step {first} on: no batch of the reference is among these"
            self.add("data-other", text, evidence, explains=("data",))
            return
        gap, times = gaps.most_common(1)[0]
        when = "later" if gap > 0 else "earlier"
        evidence.append(
            f"{times} of the {len(wrong)} batches that differ are the reference's of {abs(gap)} steps {when}"
        )
        if gap == -b.start and b.start:
            self.add("data-restart", "the data begins from its beginning again", evidence, explains=("data",))
        elif len(gaps) == 1:
            text = f"the data is {plural(abs(gap), 'step')} {'ahead of' if gap > 0 else 'behind'} the reference"
            self.add("data-offset", text, evidence, explains=("data",))
        else:
            self.add("data-order", "the same batches come in another order", evidence, explains=("data",))

    # ------------------------------------------------------------------------------------------------------ what shows

    def plausible(self) -> None:
        if "state.plausible" not in self.failed or "optimizer" in self.explained:
            return
        got, text = self.got, self.failed["state.plausible"].text
        steps = steps_of(got)
        if steps and all(v == 0 for v in steps.values()):
            moments = any(n.endswith(".exp_avg") for n in got.state)
            also = ": the moments were restored, the step was not" if moments else ""
            self.add("step-reset", f"the optimizer's step is 0 on all tensors{also}", [text], explains=("optimizer",))
        elif "no moments" in text:
            self.add("optimizer-missing", "the checkpoint has no optimizer state", [text], explains=("optimizer",))
        else:
            self.add("state-odd", f"the state is not what a training leaves: {text}", explains=("optimizer",))

    def not_finite(self) -> None:
        if "run.finite" not in self.failed:
            return
        step, found = next((s, list(not_finite(s))) for s in self.got.steps if any(True for _ in not_finite(s)))
        tensors = [w.partition(" of ")[2] for w, _ in found if " of " in w]
        grads = all(math.isfinite(v) for v in step.grads.values()) and math.isfinite(step.loss)
        text = f"numbers are not finite from step {step.step} on, first {found[0][0]} ({found[0][1]})"
        if grads and any(not math.isfinite(v) for v in step.updates.values()):
            bad = [n for n, v in step.updates.items() if not math.isfinite(v)]
            text = (
                f"the update of {scope(bad, list(step.updates), 'tensors')} is not finite in step {step.step}, though "
                "loss and gradients are: its moments hold NaN, or negative squares"
            )
            tensors = bad
            self.explained.add("optimizer")
        elif not math.isfinite(step.loss) and self.got.steps and step is self.got.steps[0]:
            self.explained.add("weights")
            text += ": the weights hold NaN or infinity, or numbers that overflow"
        self.add("not-finite", text, self.seen("run.finite"), tensors)

    def gradients_summed(self, reference: Trace) -> None:
        """The grad norm is a whole multiple, or part, while the loss is the same."""
        if "step1.grad_norm" not in self.failed or not self.passed("step1.loss"):
            return
        a, b = next((x, y) for x, y in pairs(reference, self.got) if y.step == self.got.steps[0].step)
        if not a.grad_norm or not b.grad_norm:
            return
        ratio = b.grad_norm / a.grad_norm
        n = round(ratio if ratio > 1 else 1 / ratio)
        if n < 2 or abs((ratio if ratio > 1 else 1 / ratio) / n - 1) > 1e-3:
            return
        every = [b.grads[k] / a.grads[k] for k in a.grads if a.grads[k] and k in b.grads]
        if every and deviation(median(every), ratio) > 0.05:
            return
        whose = ""
        if n == self.got.world_size:
            whose = " (its number of ranks)"
        elif n == reference.world_size:
            whose = " (the reference's number of ranks)"
        if ratio > 1:
            text = f"gradients are {n} times those of the reference{whose}: summed over ranks instead of averaged"
        else:
            text = f"gradients are 1/{n} of those of the reference{whose}: divided once too often, or summed there"
        self.explained.update(("gradients", "optimizer"))
        self.add("gradient-scale", text, self.seen("step1.grad_norm"))

    def dynamic(self, reference: Trace) -> None:
        """From numbers alone, where nothing exact has explained them."""
        first = self._first(reference)
        weights, data = "weights" in self.explained, "data" in self.explained
        same = self.passed("state.digests") and self.passed("state.names")
        if "probe.logits" in self.failed and not weights:
            evidence = self.seen("probe.logits", "step1.loss")
            if same:
                text = (
                    "the weights are equal and the logits are not: the model is configured otherwise (rope theta, eps "
                    "of the norms), or other kernels compute it"
                )
                self.add("model-configuration", text, [*evidence, *self._environment(reference)])
            else:
                self.add(
                    "weights", "the logits differ before any step: weights, or the model's configuration", evidence
                )
            weights = True
            self.explained.add("weights")
        elif "step1.loss" in self.failed and not weights and not data:
            evidence = self.seen("step1.loss", "step1.grad_norm")
            if self.passed("probe.logits") and self.passed("step1.batch"):
                text = "logits and batch are equal and the loss is not: labels, masks, or how ranks weight their tokens"
                self.add("loss-computation", text, evidence)
            elif self.passed("probe.logits"):
                self.add(
                    "data",
                    "logits are equal and the loss is not: another batch, or another computation of the loss",
                    evidence,
                )
            elif same:
                rest = "its labels and masks" if self.passed("step1.batch") else "the batch"
                text = f"the weights are equal and the loss is not: the model's configuration, its kernels, or {rest}"
                self.add("model-configuration", text, [*evidence, *self._environment(reference)])
            else:
                self.add(
                    "weights",
                    "the loss differs in the first step: weights, the model's configuration or the batch",
                    evidence,
                )
            weights = True
        if first is None:
            return
        self._frozen(reference, *first)
        ruled_out = weights or data or "gradients" in self.explained
        if not ruled_out and ("step1.grad_norm" in self.failed or "step1.worst_grad" in self.failed):
            self._gradients(reference, *first)
            ruled_out = True
        if not ruled_out and "optimizer" not in self.explained:
            if "step1.update_norm" in self.failed or "step1.worst_update" in self.failed:
                self._updates(reference, *first)
            elif not self.out and any(n.startswith("steps.") for n in self.failed):
                evidence = self.seen(*(n for n in self.failed if n.startswith("steps.")))
                kind, text = "later-steps", "something random is not the same, or noise grows"
                if first[0].update_norm is None and not first[0].updates:
                    kind, text = (
                        "optimizer",
                        "the optimizer's state or its options (the reference has no norms of updates)",
                    )
                self.add(kind, f"the first step agrees and later ones do not: {text}", evidence)

    def _first(self, reference: Trace) -> tuple[Step, Step] | None:
        return next(((a, b) for a, b in pairs(reference, self.got) if b.step == self.got.steps[0].step), None)

    def _environment(self, reference: Trace) -> list[str]:
        a, b = reference.environment, self.got.environment
        return [
            f"{k} is {b[k]} and was {a[k]}"
            for k in ("torch", "gpu", "cuda", "attention")
            if k in a and k in b and a[k] != b[k]
        ]

    def _frozen(self, reference: Trace, a: Step, b: Step) -> None:
        if not (a.updates and b.updates) or not {"step1.worst_update", "step1.update_norm"} & self.failed.keys():
            return
        still = [n for n, v in a.updates.items() if v > 0 and b.updates.get(n, None) == 0]
        still += [
            n for n, v in a.updates.items() if v > 0 and n not in b.updates and not any(n in g for g in reference.tied)
        ]
        if not still or set(still) <= {m for c in self.out for n in c.tensors for m in (n, fqn_of(n))}:
            return
        if set(self._far(reference, a, b, updates=False)) <= set(still):
            self.explained.add("gradients")
        every = list(a.updates)
        scope = "no tensor is" if len(still) == len(every) else f"{scope(still, every, 'tensors')} not"
        rates = b.learning_rates
        if rates and not any(rates):
            self.add(
                "learning-rate",
                "the learning rate is 0: nothing is updated",
                self.seen("step1.learning_rates"),
                still,
                explains=("optimizer",),
            )
            return
        text = f"{scope} updated in step {b.step}, where the reference was: frozen, or not in the optimizer"
        self.add("frozen", text, self.seen("step1.worst_update"), still, explains=("optimizer",))

    def _gradients(self, reference: Trace, a: Step, b: Step) -> None:
        evidence = self.seen("step1.grad_norm", "step1.worst_grad")
        found = self._far(reference, a, b, updates=False)
        if not found:
            self.add(
                "gradients", "the loss is equal and the gradients are not: how they are reduced or scaled", evidence
            )
            return
        every = list(a.grads)
        if len(found) <= 2 and all(re.search(r"embed|lm_head|wte", n) for n in found):
            text = f"only the gradient of {' and '.join(found)} differs: weights that are tied on one side alone"
            self.add("untied", text, evidence, found)
        elif len(found) * 10 >= len(every) * 9:
            text = "the loss is equal and all gradients are not: how they are reduced, scaled or accumulated"
            if "config.model" not in self.checks or self.checks["config.model"].verdict == "not comparable":
                text += ", or the model's configuration, of which the reference does not tell"
            self.add("gradients", text, [*evidence, *self._environment(reference)], found)
        else:
            text = f"the loss is equal and the gradient of {scope(found, every, 'tensors')} is not"
            self.add("gradients", text, evidence, found)

    def _far(self, reference: Trace, a: Step, b: Step, updates: bool) -> list[str]:
        """Tensors whose norm deviates by more than the check's bound, the farthest first."""
        check = self.checks.get("step1.worst_update" if updates else "step1.worst_grad")
        bound = check.bound if check is not None and check.bound is not None else 0.0
        every, _ = tensor_deviations(reference, self.got, a, b, updates, 1e-6)
        far = {n: d for n, (d, _, _) in every.items() if not d <= bound}
        return sorted(far, key=lambda n: -far[n] if far[n] == far[n] else -math.inf)

    def _updates(self, reference: Trace, a: Step, b: Step) -> None:
        evidence = self.seen("step1.update_norm", "step1.worst_update")
        if a.update_norm and b.update_norm:
            evidence.append(f"the norm of the update is {b.update_norm / a.update_norm:.4g} times the reference's")
        equal = "gradients are equal, " if self.passed("step1.grad_norm") else ""
        found = self._far(reference, a, b, updates=True)
        if not found:
            self.add("optimizer", f"{equal}the update is not: the optimizer's state or its options", evidence)
            return
        every = list(a.updates)
        ratios = sorted(b.updates.get(n, 0.0) / a.updates[n] for n in found if a.updates.get(n))
        if ratios:
            evidence.append(f"updates are {ratios[0]:.3g} to {ratios[-1]:.3g} times those of the reference")
        guess = "moments dropped or of another step, a step that was reset, or other betas"
        if self.passed("state.digests"):
            guess = "its options, since its state is equal"
        if len(found) * 10 >= len(every) * 9:
            most = "all" if len(found) == len(every) else "nearly all"
            text = f"{equal}the updates of {most} {len(found)} tensors are not: {guess}"
            self.add("optimizer", text, evidence, found)
            return
        known = options(self.got)
        members: dict[int, set[str]] = {}
        for n, chosen in known.items():
            members.setdefault(id(chosen), set()).add(n)
        group = next((m for m in members.values() if len(members) > 1 and set(found) == m & set(every)), None)
        if group is not None and len(found) > 1:
            text = f"{equal}the updates of one param group ({plural(len(found), 'tensor')}) are not: its options"
            self.add("optimizer-group", text, evidence, found)
            return
        whose = "its" if len(found) == 1 else "their"
        text = f"{equal}the update of {scope(found, every, 'tensors')} is not: {whose} moments"
        self.add("moments", text, evidence, found)

    # ----------------------------------------------------------------------------------------------- ranks, round trip

    def ranks(self) -> None:
        if "run.ranks" in self.failed:
            step = next(s for s in self.got.steps if s.losses and any(x != s.losses[0] for x in s.losses))
            losses = [repr(x) for x in step.losses or []]
            usual, times = Counter(losses).most_common(1)[0]
            odd = [r for r, x in enumerate(losses) if x != usual]
            if times * 2 > len(losses):
                who = f"ranks {listed(map(str, odd), 8)} disagree" if len(odd) > 1 else f"rank {odd[0]} disagrees"
                text = f"{who} with the others on the loss, from step {step.step} on"
            else:
                text = f"ranks disagree on the loss, from step {step.step} on: it is not reduced over all of them"
            self.add("rank-disagrees", text, self.seen("run.ranks"))
        if "probe.ranks" in self.failed and "run.ranks" not in self.failed and "weights" not in self.explained:
            text = "ranks compute different logits from one batch: other weights on some, or no eval mode"
            self.add("rank-disagrees", text, self.seen("probe.ranks"))

    def run(self) -> None:
        if "run.dead" in self.failed and not self.out:
            self.add(
                "no-gradient",
                "no gradient arrives: parameters are frozen, or the loss does not depend on them",
                self.seen("run.dead"),
            )
        if "run.spike" in self.failed and not self.out:
            self.add("spike", f"training leaps: {self.failed['run.spike'].text}", self.seen("run.spike"))

    def round_trip(self) -> None:
        if "roundtrip.state" in self.failed:
            names = [str(n) for n in self.got.roundtrip.get("differing", [])]
            text = f"saving and loading again changes {plural(len(names), 'tensor')}, first {spoken(names[0])}"
            self.add("save-or-load", text, self.seen("roundtrip.state"), names)
