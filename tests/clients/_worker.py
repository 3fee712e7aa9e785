# SPDX-License-Identifier: AGPL-3.0-or-later
"""A worker that answers by what the last message says, so that a client's test knows the reply.

| The last message | Reply |
| --- | --- |
| is a tool's | "It is 21 degrees in Paris." |
| is a user's, and tools are offered | a call of the first tool, its arguments from ``ARGUMENTS`` |
| asks for a JSON format | ``PERSON`` as JSON |
| contains "slowly" | two words, then nothing until the request is cancelled |
| contains "reason" | reasoning, then "Blue." |
| contains "fail" | a fault |
| anything else | "Blue, like the sky." in four posts when it is streamed |
"""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

ANSWER_SECONDS = 30
IDLE_SECONDS = 0.05
HOLD_SECONDS = 60  # a request that nobody cancels; long after the test failed

MODEL = "tests/clients-model"
FEATURES = [
    *(
        "tools",
        "json_object",
        "json_schema",
        "tools_with_response_format",
        "seed",
        "presence_penalty",
        "frequency_penalty",
    ),
    *(
        "reasoning_effort",
        "tool_choice_enforced",
        "single_tool_call_enforced",
        "structured_output_enforced",
    ),
    "prompt_overflow_refused",
]
PIECES = ["Blue", ", like", " the", " sky."]
WEATHER = "It is 21 degrees in Paris."
PERSON = {"name": "Ada", "age": 36}
# Any other function gets PERSON.
ARGUMENTS: dict[str, dict[str, Any]] = {"get_weather": {"city": "Paris"}}

type Job = dict[str, Any]


class AnsweringWorker:
    """Pops until it is stopped; each job is served in a thread of its own."""

    def __init__(
        self,
        api_url: str,
        key: str,
        name: str = "answering worker",
        model: str = MODEL,
        max_context_length: int = 8192,
    ) -> None:
        self._http = httpx.Client(
            base_url=f"{api_url}/v2", headers={"apikey": key}, timeout=ANSWER_SECONDS
        )
        self._name, self.model, self._max_context_length = name, model, max_context_length
        self._is_stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self.payloads: list[Job] = []
        # What it declares; with `vision` it takes images by value. `Stack.declaring` changes it.
        self.features: Sequence[str] = FEATURES
        self._shall_rest = False
        self._is_resting = threading.Event()

    def run(self) -> None:
        """Pop and serve until stopped."""
        while not self._is_stopped.is_set():
            if self._shall_rest:
                self._is_resting.set()
                self._is_stopped.wait(IDLE_SECONDS)
                continue
            job = self.pop()
            if job["id"] is None:
                self._is_stopped.wait(IDLE_SECONDS)
                continue
            self.payloads.append(job["payload"])
            thread = threading.Thread(target=self.serve, args=(job,))
            self._threads.append(thread)
            thread.start()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Takes no job meanwhile, and is known all the same."""
        self._is_resting.clear()
        self._shall_rest = True
        assert self._is_resting.wait(ANSWER_SECONDS)
        try:
            yield
        finally:
            self._shall_rest = False

    def pop(self) -> Job:
        """A pop with a declaration."""
        body = {
            "name": self._name,
            "models": [self.model],
            "bridge_agent": "Horde Bridge:1:https://example.org",
            "max_length": 1024,
            "max_context_length": self._max_context_length,
            "threads": 16,
            "chat_jobs": True,
            "model_id": self.model,
            "chat_features": list(features := self.features),
            **({"image_transports": ["base64"]} if "vision" in features else {}),
            "chat_limits": {"max_context_length": self._max_context_length, "max_length": 1024},
        }
        answer = self._http.post("/generate/text/pop", json=body)
        answer.raise_for_status()
        return dict(answer.json())

    def serve(self, job: Job) -> None:
        """Answer one job."""
        payload = job["payload"]
        if "messages" not in payload:
            self.submit_text(job)
            return
        last = payload["messages"][-1]
        said = str(last["content"])
        if last["role"] == "tool":
            self.reply(job, [WEATHER])
        elif payload.get("tools") and payload.get("tool_choice") != "none":
            self.submit(job, tool_calls=[build_call(choose_function(payload))])
        elif (payload.get("response_format") or {}).get("type", "text") != "text":
            self.reply(job, [json.dumps(PERSON)])
        elif "slowly" in said:
            self.hold(job)
        elif "reason" in said:
            self.reply(job, ["Blue."], reasoning="The sky comes to mind.")
        elif "fail" in said:
            self._http.post(
                "/generate/text/submit",
                json={"id": job["id"], "state": "faulted", "model_id": job["model"]},
            )
        else:
            self.reply(job, PIECES)

    def reply(self, job: Job, pieces: list[str], reasoning: str | None = None) -> None:
        """Post the pieces when that is wanted, then submit the whole."""
        deltas = [{"reasoning_content": reasoning}] if reasoning else []
        deltas += [{"content": piece} for piece in pieces]
        if job["payload"].get("stream_progress"):
            for number, delta in enumerate(deltas, start=1):
                self.post(job, number, delta)
        self.submit(job, "".join(pieces), **({"reasoning_content": reasoning} if reasoning else {}))

    def post(self, job: Job, number: int, delta: dict[str, str]) -> dict[str, Any]:
        """Tell what was generated since the last post."""
        return dict(
            self._http.post(
                "/generate/text/progress", json={"id": job["id"], "seq": number, "delta": delta}
            ).json()
        )

    def submit_text(self, job: Job) -> None:
        """Hand in the text that goes on from a prompt."""
        body = {"id": job["id"], "generation": "".join(PIECES), "state": "ok", "seed": 1}
        answer = self._http.post("/generate/text/submit", json=body)
        assert answer.status_code == 200, answer.text

    def submit(self, job: Job, content: str | None = None, **more: Any) -> None:
        """Hand the reply in."""
        body = {
            "id": job["id"],
            "model_id": job["model"],
            "message": {"role": "assistant", "content": content, **more},
            "finish_reason": "tool_calls" if "tool_calls" in more else "stop",
            "prompt_tokens": 21,
            "completion_tokens": 5,
        }
        answer = self._http.post("/generate/text/submit", json=body)
        assert answer.status_code == 200, answer.text

    def hold(self, job: Job) -> None:
        """Say two words and go on only when the request is cancelled, as a worker that generates
        for long would.
        """
        number = 0
        for _ in range(int(HOLD_SECONDS / IDLE_SECONDS)):
            if self._is_stopped.wait(IDLE_SECONDS * 4 if number else 0):
                return
            if not job["payload"].get("stream_progress"):
                continue
            number += 1
            answer = self.post(
                job, number, {"content": ["One,", " two,"][number - 1] if number <= 2 else "."}
            )
            if answer.get("cancelled") or "rc" in answer:
                return

    def stop(self) -> None:
        """Stop popping, and stop holding jobs."""
        self._is_stopped.set()

    def close(self) -> None:
        """Wait for the jobs, once nothing pops any more."""
        for thread in self._threads:
            thread.join()
        self._http.close()


class SteppingWorker(AnsweringWorker):
    """Does an agent's task step by step: a call for each result that came, then the last word,
    which whoever offers no tools gets at once.
    """

    def __init__(
        self,
        api_url: str,
        key: str,
        model: str,
        steps: Sequence[tuple[str, dict[str, Any]]],
        last: str,
    ) -> None:
        super().__init__(api_url, key, f"worker of {model}", model, max_context_length=131072)
        self._steps, self._last = steps, last

    def serve(self, job: Job) -> None:
        """The next step of the task."""
        payload = job["payload"]
        done = sum(message["role"] == "tool" for message in payload["messages"])
        if not payload.get("tools") or done == len(self._steps):
            self.reply(job, [self._last])
            return
        name, arguments = self._steps[done]
        called = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"call_{done + 1}", "type": "function", "function": called}
        self.submit(job, f"Step {done + 1}.", tool_calls=[call])


def choose_function(payload: Job) -> str:
    """The function that has to be called, else the first."""
    choice = payload.get("tool_choice")
    tool = choice if isinstance(choice, dict) else payload["tools"][0]
    return str(tool["function"]["name"])


def build_call(name: str) -> dict[str, Any]:
    """A call as an OpenAI-compatible backend makes it."""
    arguments = json.dumps(ARGUMENTS.get(name, PERSON))
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


@contextmanager
def running_worker(api_url: str, key: str) -> Iterator[AnsweringWorker]:
    """The worker, known to the API."""
    with run_worker(AnsweringWorker(api_url, key)) as worker:
        yield worker


@contextmanager
def run_worker[W: AnsweringWorker](worker: W) -> Iterator[W]:
    """A worker that serves, known to the API."""
    worker.pop()
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join()
        worker.close()
