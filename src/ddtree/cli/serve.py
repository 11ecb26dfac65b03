"""`ddtree serve`: the options of the server, and what they become."""

from typing import Annotated

import typer

from ddtree.cli import options as opt
from ddtree.cli.interrupts import interrupts_end_at_once
from ddtree.cli.load import load_engine
from ddtree.config import EngineConfig, SamplingParams
from ddtree.errors import InvalidOption
from ddtree.threads import in_passing_thread

SEED = "Seed of every request that sends none; default: a fresh one for each."
SERVED = "Name that clients ask for; may be given several times, answers show the first. Default: that of --model."
API_KEY = (
    "A key that opens /v1 and /reset_prefix_cache; may be given several times. "
    "Better as $DDTREE_API_KEY, which no list of processes shows."
)
QUEUE = "Requests that may wait for a slot; more are refused with 429."
SHUTDOWN = "Seconds that running answers may go on after SIGTERM or the first Ctrl-C; then they are cut, and told so."
REASONING = "Put what the model thinks into reasoning_content: deepseek_r1 or qwen3. Default: it stays in content."
TOOLS = "How the model writes tool calls: hermes."
ORIGINS = (
    "Web page that may call from a browser, as https://chat.example; may be given several times. Default: all of them."
)
SPEC_METRICS = "summary: every answer carries metrics.speculative_decoding; none: those that ask for it."
SERVED_BY = "Who serves: ddtree, or sglang (then `ddtree serve-sglang --help` has the options)."
VLLM_METRICS = "Give /metrics under the names of vLLM and SGLang too, for load tools and dashboards made for them."


def serve(
    engine: Annotated[str, typer.Option("--engine", help=SERVED_BY)] = "ddtree",
    model: opt.Model = opt.ENGINE.model,
    drafter: opt.Drafter = opt.ENGINE.drafter,
    mode: opt.Mode = opt.SPECULATION.mode,
    tree_budget: opt.TreeBudget = None,
    tree_top_k: opt.TreeTopK = None,
    tree_spine: opt.TreeSpine = opt.SPECULATION.tree_spine,
    tree_context: opt.TreeContext = opt.SPECULATION.tree_context,
    max_tree_budget: opt.MaxTreeBudget = opt.ENGINE.max_tree_budget,
    device: opt.Device = opt.ENGINE.device,
    dtype: opt.Dtype = opt.ENGINE.dtype,
    max_model_len: opt.MaxModelLen = opt.ENGINE.max_model_len,
    cuda_graphs: opt.CudaGraphs = "on",
    draft_dtype: opt.DraftDtype = opt.ENGINE.draft_dtype,
    draft_vocab: opt.DraftVocab = opt.ENGINE.draft_vocab,
    draft_pairwise: opt.DraftPairwise = opt.ENGINE.draft_pairwise,
    numerics: opt.Numerics = opt.ENGINE.numerics,
    max_running_requests: opt.MaxRunningRequests = opt.ENGINE.max_running_requests,
    chunked_prefill_size: opt.ChunkedPrefillSize = opt.ENGINE.prefill_chunk,
    prefix_caching: opt.PrefixCaching = opt.ENGINE.prefix_caching,
    seed: Annotated[int | None, typer.Option("--seed", help=SEED)] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for every one of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 takes a free one.")] = 30000,
    served_model_name: Annotated[list[str] | None, typer.Option("--served-model-name", help=SERVED)] = None,
    api_key: Annotated[
        list[str] | None, typer.Option("--api-key", envvar="DDTREE_API_KEY", show_default=False, help=API_KEY)
    ] = None,
    reasoning_parser: Annotated[str | None, typer.Option("--reasoning-parser", help=REASONING)] = None,
    tool_call_parser: Annotated[str, typer.Option("--tool-call-parser", help=TOOLS)] = "hermes",
    max_queue: Annotated[int, typer.Option("--max-queue", help=QUEUE)] = 256,
    max_body_mib: Annotated[float, typer.Option("--max-body-mib", help="Largest body of a request, in MiB.")] = 4.0,
    shutdown_timeout: Annotated[float, typer.Option("--shutdown-timeout", help=SHUTDOWN)] = 30.0,
    vllm_metrics: Annotated[bool, typer.Option("--vllm-metrics", help=VLLM_METRICS)] = False,
    per_request_spec_decode_metrics: Annotated[
        str, typer.Option("--per-request-spec-decode-metrics", help=SPEC_METRICS)
    ] = "none",
    allowed_origin: Annotated[list[str] | None, typer.Option("--allowed-origin", help=ORIGINS)] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log/--no-access-log", help="A line on standard error for each request.")
    ] = True,
    log_level: Annotated[
        str, typer.Option("--log-level", help="debug (with a line of JSON for each round), info, warning or error.")
    ] = "info",
) -> None:
    """Serve the model over HTTP, as OpenAI's API has it."""
    if engine != "ddtree":
        raise InvalidOption(f"engine {engine!r} is unknown: choose ddtree or sglang", param="engine")
    speculation = opt.speculation(mode, tree_budget, tree_top_k, tree_spine, tree_context)
    config = EngineConfig(
        model, drafter, speculation, device, dtype, max_model_len,
        max_running_requests=max_running_requests,
        max_tree_budget=max_tree_budget,
        prefill_chunk=chunked_prefill_size,
        prefix_caching=prefix_caching,
        cuda_graphs=opt.switched_on("cuda_graphs", cuda_graphs),
        draft_dtype=draft_dtype,
        draft_vocab=draft_vocab,
        draft_pairwise=draft_pairwise,
        numerics=numerics,
    )  # fmt: skip
    SamplingParams(seed=seed)  # a seed out of range is refused before anything large loads
    with interrupts_end_at_once():
        from ddtree.models import drop_unfinished
        from ddtree.server import ServerOptions, check_port
        from ddtree.server import serve as serve_http

    options = ServerOptions(
        served_model_names=tuple(served_model_name or (model,)),
        default_seed=seed,
        api_keys=tuple(api_key or ()),
        max_queue=max_queue,
        shutdown_timeout=shutdown_timeout,
        reasoning_parser=reasoning_parser,
        tool_call_parser=tool_call_parser,
        vllm_metrics=vllm_metrics,
        access_log=access_log,
        log_level=log_level,
        max_body_mib=max_body_mib,
        allowed_origins=tuple(allowed_origin or ("*",)),
        spec_decode_metrics=per_request_spec_decode_metrics,
    )
    check_port(host, port)
    with interrupts_end_at_once(drop_unfinished):
        loaded = in_passing_thread(lambda: load_engine(config, warm=True))
    serve_http(loaded, host, port, options)
