"""nginx in front of replicas: streams pass at once, no request is computed twice. Why: docs/deploy.md."""

from collections.abc import Collection

from ddtree.deploy.spec import Deployment
from ddtree.deploy.units import bracketed, upstreams

READ_SECONDS = 3600  # of silence: a long prompt before its first token
CONNECT_SECONDS = 2
IDLE_SECONDS = 3  # a connection is kept; servers drop theirs after 5 (SGLang) or 10 s, and a race would lose a request
FAIL_SECONDS = 5  # that a replica which refused is left out
ROUTES = {"embedded": ("/v1/", "= /health", "= /openapi.json"), "sglang": ("/v1/", "= /health", "= /generate")}

CONFIG = """\
daemon off;
worker_processes 2;
pid nginx.pid;
error_log stderr warn;

events {{
    worker_connections 4096;
}}

http {{
    access_log off;  # each server logs its own requests
    server_tokens off;
    # A reload closes idle connections, and a request that is sent in that moment would be lost with its own.
    keepalive_timeout 0;
    client_max_body_size {body}m;
    client_body_buffer_size {body}m;  # prompts are never written to a file
    # Under the folder that -p names:
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;

    upstream {name} {{
        zone {name} 128k;  # both workers count failures and requests together
        least_conn;
{servers}
        keepalive 64;
        keepalive_timeout {idle}s;
    }}

    server {{
        listen {listen};

        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_set_header Host $http_host;
        proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
        proxy_set_header X-Forwarded-Proto $scheme;
        proxy_buffering off;  # a token goes on when it comes
        proxy_connect_timeout {connect}s;
        proxy_read_timeout {read}s;
        proxy_send_timeout 60s;
        # Another replica is tried where a connection failed, and for GET after 502 and 503 too. A POST that went out
        # is not sent again: it may be running, or be what ended the replica.
        proxy_next_upstream error timeout http_502 http_503;
        # But a replica that stops says 503 without having begun: then, and only then, the POST goes on.
        proxy_intercept_errors on;
        recursive_error_pages on;
        error_page 503 = @again;
        error_page 502 = @nobody;

{locations}
        location @again {{
            proxy_intercept_errors off;
            proxy_next_upstream error timeout http_503 non_idempotent;
            proxy_pass http://{name};
        }}
        location @nobody {{
            default_type application/json;
            add_header Retry-After 5 always;
            return 503 '{nobody}';
        }}
        # Metrics, caches and the like are each replica's own: ask it by its port.
        location / {{
            default_type application/json;
            return 404 '{unknown}';
        }}
    }}
}}
"""
ERROR = '{{"error": {{"message": "{}", "type": "{}", "param": null, "code": "{}"}}}}'


def config(d: Deployment, host: str, down: Collection[str] = ()) -> str:
    """A whole configuration, for `nginx -p FOLDER -c FILE`.

    Args:
        host: whose router it is.
        down: names of that host's replicas that get no new requests.
    """
    servers = []
    for replica, address in upstreams(d, host):
        left_out = " down" if replica.host == host and replica.name in down else ""
        server = f"{address}:{replica.port} max_fails=1 fail_timeout={FAIL_SECONDS}s{left_out}"
        servers.append(f"        server {server};  # {replica.name} of {replica.host}")
    locations = [
        f"        location {route} {{\n            proxy_pass http://{d.name};\n        }}"
        for route in ROUTES[d.engine]
    ]
    return CONFIG.format(
        name=d.name,
        body=d.router.max_body_mib,
        servers="\n".join(servers),
        idle=IDLE_SECONDS,
        listen=f"{bracketed(d.router.host)}:{d.router.port}",
        connect=CONNECT_SECONDS,
        read=READ_SECONDS,
        locations="\n".join(locations),
        nobody=ERROR.format(f"no replica of {d.name} answers: try again", "service_unavailable_error", "no_replica"),
        unknown=ERROR.format("the router has no such route", "invalid_request_error", "not_found"),
    )
