"""Every command but `serve`: what each takes, which room does it, what it prints. Torch loads inside them."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree.cli import options as opt
from ddtree.cli.load import load_engine
from ddtree.config import DEFAULT_MAX_BUDGET, MODES, EngineConfig, SamplingParams, Speculation
from ddtree.errors import InvalidOption

if TYPE_CHECKING:
    from ddtree.engine import Engine, Generation

SEED_GENERATE = "The same seed gives the same text; default: a fresh one. Counts at temperatures above 0."
SEED_BENCH = "Seed of every request, so that all modes draw the same noise."
BENCH_MAX_TOKENS = 128
GENERATE_MAX_TOKENS = 256


def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model; - reads it from standard input.")],
    model: opt.Model = opt.ENGINE.model,
    drafter: opt.Drafter = opt.ENGINE.drafter,
    mode: opt.Mode = opt.SPECULATION.mode,
    tree_budget: opt.TreeBudget = None,
    tree_top_k: opt.TreeTopK = None,
    tree_spine: opt.TreeSpine = opt.SPECULATION.tree_spine,
    tree_context: opt.TreeContext = opt.SPECULATION.tree_context,
    device: opt.Device = opt.ENGINE.device,
    dtype: opt.Dtype = opt.ENGINE.dtype,
    max_model_len: opt.MaxModelLen = opt.ENGINE.max_model_len,
    cuda_graphs: opt.CudaGraphs = "on",
    draft_dtype: opt.DraftDtype = opt.ENGINE.draft_dtype,
    draft_vocab: opt.DraftVocab = opt.ENGINE.draft_vocab,
    draft_pairwise: opt.DraftPairwise = opt.ENGINE.draft_pairwise,
    numerics: opt.Numerics = opt.ENGINE.numerics,
    max_tokens: opt.MaxTokens = GENERATE_MAX_TOKENS,
    temperature: opt.Temperature = opt.SAMPLING.temperature,
    seed: Annotated[int | None, typer.Option("--seed", help=SEED_GENERATE)] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Give the prompt to the model as it is, without the chat template.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print speed and acceptance to standard error at the end.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
) -> None:
    """Answer one prompt, and print the text as it comes."""
    speculation = opt.speculation(mode, tree_budget, tree_top_k, tree_spine, tree_context)
    opt.refuse_unread(mode, tree_budget, tree_top_k, tree_spine, tree_context)
    config = EngineConfig(
        model, drafter, speculation, device, dtype, max_model_len,
        max_running_requests=1,
        cuda_graphs=opt.switched_on("cuda_graphs", cuda_graphs),
        draft_dtype=draft_dtype,
        draft_vocab=draft_vocab,
        draft_pairwise=draft_pairwise,
        numerics=numerics,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    text = _read_prompt(prompt, raw)
    engine = load_engine(config)
    ids = engine.text.encode(text) if raw else engine.text.chat([{"role": "user", "content": text}])
    generation = _stream(engine, ids, sampling, speculation, timed=stats, show=not as_json)
    if as_json:
        typer.echo(json.dumps(_generation_json(generation)))
    if stats:
        typer.echo(_generation_stats(generation), err=True)


def smoke(
    url: Annotated[str, typer.Argument(help="The server, such as http://127.0.0.1:30000; with or without /v1.")],
    label: Annotated[
        str | None, typer.Option("--label", help="A name for this server in the result; default: the URL.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model to ask for; default: the first of /v1/models.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="Sent as a bearer token; default: $OPENAI_API_KEY.")
    ] = None,
) -> None:
    """Send one chat request to a server. The last line is one JSON object; exit code 0 if an answer came, else 1."""
    from ddtree.bench.smoke import smoke as ask

    if not (api_key or "").isascii():
        raise InvalidOption("--api-key must be ASCII: it travels in an HTTP header", param="api_key")
    result = ask(url, label=label, model=model, api_key=api_key or os.environ.get("OPENAI_API_KEY"))
    typer.echo(json.dumps(result))
    if "error" in result:
        typer.echo(f"error: {result['error']}", err=True)
        raise typer.Exit(1)


def bench(
    model: opt.Model = opt.ENGINE.model,
    drafter: opt.Drafter = opt.ENGINE.drafter,
    modes: Annotated[str, typer.Option("--modes", help="Modes to measure, separated by commas.")] = ",".join(MODES),
    tree_budget: opt.TreeBudget = None,
    tree_top_k: opt.TreeTopK = None,
    tree_spine: opt.TreeSpine = opt.SPECULATION.tree_spine,
    tree_context: opt.TreeContext = opt.SPECULATION.tree_context,
    budgets: Annotated[
        str | None,
        typer.Option("--budgets", help='More budgets to measure tree at, such as "7,31": modes tree@7 and tree@31.'),
    ] = None,
    device: opt.Device = opt.ENGINE.device,
    dtype: opt.Dtype = opt.ENGINE.dtype,
    max_model_len: opt.MaxModelLen = opt.ENGINE.max_model_len,
    cuda_graphs: opt.CudaGraphs = "on",
    draft_dtype: opt.DraftDtype = opt.ENGINE.draft_dtype,
    draft_vocab: opt.DraftVocab = opt.ENGINE.draft_vocab,
    draft_pairwise: opt.DraftPairwise = opt.ENGINE.draft_pairwise,
    numerics: opt.Numerics = opt.ENGINE.numerics,
    limit: Annotated[int | None, typer.Option("--limit", help="Take only the first prompts of the suite.")] = None,
    max_tokens: opt.MaxTokens = BENCH_MAX_TOKENS,
    temperature: opt.Temperature = opt.SAMPLING.temperature,
    seed: Annotated[int, typer.Option("--seed", help=SEED_BENCH)] = 0,
    repeat: Annotated[int, typer.Option("--repeat", help="How often to run the suite.")] = 1,
    output: Annotated[Path | None, typer.Option("--output", help="Write the JSON document to this file too.")] = None,
) -> None:
    """Measure the modes against each other over a prompt suite. The last line is one JSON document.

    Exit code 1 if a mode gives other tokens than ar in float32: then no speed-up is shown.
    """
    from ddtree.bench.suite import make_plan

    base = opt.speculation(opt.SPECULATION.mode, tree_budget, tree_top_k, tree_spine, tree_context)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    plan = make_plan(modes, budgets, base, sampling, limit, repeat)
    # The engine is loaded for a mode that drafts, if any does: so a missing drafter is told before the run, not in it.
    first = next((variant for variant in plan.variants.values() if variant.mode != "ar"), Speculation("ar"))
    # Answers come one after another. Without reuse: all variants answer the same prompts, and the first would pay the
    # prefill of all.
    config = EngineConfig(
        model, drafter, first, device, dtype, max_model_len,
        max_running_requests=1,
        max_tree_budget=max(DEFAULT_MAX_BUDGET, *(variant.tree_budget for variant in plan.variants.values())),
        prefix_caching=False,
        cuda_graphs=opt.switched_on("cuda_graphs", cuda_graphs),
        draft_dtype=draft_dtype,
        draft_vocab=draft_vocab,
        draft_pairwise=draft_pairwise,
        numerics=numerics,
    )  # fmt: skip
    _check_writable(output)
    from tqdm import tqdm

    from ddtree.bench.report import make_report
    from ddtree.bench.run import measure_stages, run, steps
    from ddtree.bench.tables import format_report

    engine = load_engine(config)
    seldom = 0.1 if sys.stderr.isatty() else 30.0  # a log keeps every state of the bar
    with tqdm(total=steps(plan), desc="bench", unit="run", file=sys.stderr, mininterval=seldom) as progress:
        samples = run(engine, plan, progress.update)
        stages = measure_stages(engine, plan, progress.update)
    info = engine.info()
    del info["speculation"]  # of the engine's own mode: the report names the settings of all
    report = make_report(samples, stages, plan, engine.settled(base), info)
    typer.echo(format_report(report))
    typer.echo(json.dumps(report))
    if output is not None:
        try:
            output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidOption(f"output {str(output)!r} was not written: {error.strerror}", param="output") from error
    if report["parity"] == "red":
        raise typer.Exit(1)


def models(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False) -> None:
    """List the models and drafters that need no hub, with size, licence and source."""
    from dataclasses import asdict

    from ddtree.bench.tables import format_table
    from ddtree.models import list_models

    entries = list_models()
    if as_json:
        typer.echo(json.dumps([asdict(entry) | {"path": str(entry.path)} for entry in entries]))
        return
    rows = [
        [entry.name, entry.kind, f"{entry.size / 1e6:.1f} MB" if entry.cached else "not fetched yet", entry.licence,
         entry.source, str(entry.path)]
        for entry in entries
    ]  # fmt: skip
    typer.echo(format_table(["name", "kind", "size", "licence", "source", "where"], rows, left=(0, 1, 3, 4, 5)))


def _read_prompt(prompt: str, raw: bool) -> str:
    """The prompt as given or, for "-", from standard input; a chat message loses the newline that `echo` adds."""
    try:
        # os.fsencode gives back the bytes that were typed, so both ways in are checked alike.
        if prompt == "-" and sys.stdin is None:
            raise InvalidOption("PROMPT is -, but standard input is closed: give the text itself", param="prompt")
        text = (sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt)).decode("utf-8")
    except UnicodeError as error:
        raise InvalidOption(
            "PROMPT is not UTF-8 text: convert it first, for example with iconv", param="prompt"
        ) from error
    if not (text if raw else text.strip()):
        raise InvalidOption("PROMPT is empty: give some text, or - to read it from standard input", param="prompt")
    return text if raw else text.rstrip("\r\n")


def _stream(
    engine: "Engine", ids: list[int], sampling: SamplingParams, speculation: Speculation, *, timed: bool, show: bool
) -> "Generation":
    """Generate, printing each piece at once if `show`; stages are timed only if `timed`, because that costs time."""
    from ddtree.engine import StageTimer

    generation = None
    for chunk in engine.stream(ids, sampling, speculation, observer=StageTimer() if timed else None):
        if show:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
        generation = chunk.generation or generation
    if show:
        typer.echo()
    if generation is None:
        raise RuntimeError("the engine's stream ended without its last chunk")
    return generation


def _generation_json(generation: "Generation") -> dict[str, Any]:
    keys = ("text", "token_ids", "finish_reason", "mode", "rounds", "acceptance_length", "seconds", "tok_s")
    result = {key: getattr(generation, key) for key in keys}
    if generation.shadow is not None:
        shadow_keys = ("linear_acceptance_length", "tree_acceptance_length", "overhead", "agree")
        result["shadow"] = {key: getattr(generation.shadow, key) for key in shadow_keys}
    return result


def _generation_stats(generation: "Generation") -> str:
    lines = [
        f"mode {generation.mode}: {generation.prompt_tokens} prompt tokens, {len(generation.token_ids)} tokens in "
        f"{generation.rounds} rounds, acceptance length {_figure(generation.acceptance_length)}, "
        f"finish {generation.finish_reason}",
        f"{generation.tok_s:.1f} tok/s; {generation.seconds:.2f} s in all, prefill {generation.prefill_seconds:.2f} s, "
        f"decode {generation.decode_seconds:.2f} s",
    ]
    if generation.shadow is not None:
        shadow = generation.shadow
        lengths = f"linear {_figure(shadow.linear_acceptance_length)}, tree {_figure(shadow.tree_acceptance_length)}"
        lines.append(f"shadow: acceptance length {lengths}, agree {shadow.agree}")
    if generation.stages:
        lines.append(
            "stages: " + ", ".join(f"{name} {1000 * spent:.1f} ms" for name, spent in generation.stages.items())
        )
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _check_writable(output: Path | None) -> None:
    """Refuse a file that cannot be written before the run, not after it."""
    if output is None:
        return
    try:
        output.open("a", encoding="utf-8").close()
    except OSError as error:
        raise InvalidOption(f"output {str(output)!r} cannot be written: {error.strerror}", param="output") from error
