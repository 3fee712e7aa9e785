# The API. The same image runs every command: `docker run IMAGE db migrate`, `docker run IMAGE user create --username NAME`, ...
# Settings come from the environment; docs/reference lists them. Nothing secret is in the image.

FROM python:3.12-slim AS build
COPY requirements.txt .
# --no-deps: the file is complete. Bytecode is made here, since the running user cannot write it.
RUN python -m venv /opt/horde/venv \
    && /opt/horde/venv/bin/pip install --no-cache-dir --no-deps -r requirements.txt

FROM python:3.12-slim
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin horde
COPY --from=build /opt/horde/venv /opt/horde/venv
WORKDIR /opt/horde
COPY LICENSE server.py ./
COPY sql_statements sql_statements
COPY horde horde
RUN python -m compileall -q horde
ENV PATH=/opt/horde/venv/bin:$PATH \
    PYTHONPATH=/opt/horde \
    PYTHONUNBUFFERED=1 \
    HORDE_ENVIRONMENT=production
USER horde
EXPOSE 7001
# Inside a container loopback reaches nobody: the orchestrator decides what is published.
ENTRYPOINT ["python", "-m", "horde.cli.main"]
CMD ["serve", "--listen", "0.0.0.0", "--port", "7001"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:7001/api/v2/status/heartbeat', timeout=4)"]
