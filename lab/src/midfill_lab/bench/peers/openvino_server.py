"""A program of its own that serves a GGUF file with OpenVINO GenAI.

    PYTHON openvino_server.py MODEL.gguf PORT THREADS GIGABYTES TOKENS SEQUENCES

GIGABYTES of KV; a step computes up to TOKENS tokens of up to SEQUENCES sequences.

OpenVINO GenAI is a library; its pipeline of continuous batching, with its prefix cache on, answers
here what ``bench peers`` asks of a server: GET /health and /v1/models, and OpenAI's POST
/v1/completions, greedy and streamed. It is run with the interpreter that has openvino-genai, and
imports nothing of midfill.
"""

import importlib
import json
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

_HALF_CHARACTER = "\ufffd"


class Model(Protocol):
    """What is served: a pipeline, and what its requests are made of."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text in which special tokens may be written."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""

    def add(self, number: int, tokens: Sequence[int], answer: int) -> Any:
        """Queue a greedy answer of so many tokens; return the pipeline's handle of it."""

    def step(self) -> None:
        """Compute the next tokens of what is queued."""


class OpenVinoModel:
    """A model in OpenVINO GenAI's pipeline of continuous batching."""

    def __init__(
        self, path: str, threads: int, gigabytes: int, tokens: int, sequences: int
    ) -> None:
        self._openvino = importlib.import_module("openvino")
        self._genai = importlib.import_module("openvino_genai")
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = gigabytes
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = tokens
        scheduler.max_num_seqs = sequences
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = self._genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)
        self._tokenizer = self._pipeline.get_tokenizer()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text in which special tokens may be written."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).input_ids.data
        return [int(token) for token in ids[0]]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(list(tokens)))

    def add(self, number: int, tokens: Sequence[int], answer: int) -> Any:
        """Queue a greedy answer of so many tokens; return the pipeline's handle of it."""
        numpy = importlib.import_module("numpy")
        config = self._genai.GenerationConfig()
        config.max_new_tokens = answer
        config.do_sample = False
        config.ignore_eos = True
        prompt = self._openvino.Tensor(numpy.array([tokens], numpy.int64))
        return self._pipeline.add_request(number, prompt, config)

    def step(self) -> None:
        """Compute the next tokens of what is queued."""
        self._pipeline.step()


class Engine:
    """Runs a model's steps on a thread of its own, and hands on what they make."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._changed = threading.Condition()
        self._running: dict[int, tuple[Any, queue.SimpleQueue[list[int] | None], int]] = {}
        self._requests = 0
        threading.Thread(target=self._run, daemon=True).start()

    def answer(self, tokens: Sequence[int], length: int) -> Iterator[list[int]]:
        """Yield an answer's tokens as they are made."""
        made: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        with self._changed:
            self._requests += 1
            handle = self.model.add(self._requests, tokens, length)
            self._running[self._requests] = handle, made, length
            self._changed.notify()
        while (found := made.get()) is not None:
            yield found

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._running)
                running = dict(self._running)
            self.model.step()
            for number, (handle, made, missing) in running.items():
                while handle.can_read():
                    tokens = [int(token) for token in handle.read()[0].generated_ids]
                    missing -= len(tokens)
                    made.put(tokens)
                with self._changed:
                    self._running[number] = handle, made, missing
                    if missing <= 0:
                        del self._running[number]
                        made.put(None)


class Handler(BaseHTTPRequestHandler):
    """Answers one connection's request.

    Attributes:
        engine: of the server.
    """

    engine: Engine

    def do_GET(self) -> None:
        """List the model, which is loaded, whatever is asked for."""
        self._begin("application/json")
        self.wfile.write(b'{"object": "list", "data": [{"id": "model", "object": "model"}]}')

    def do_POST(self) -> None:
        """Complete a prompt, a text or token ids, and stream the answer."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        model, prompt = self.engine.model, body["prompt"]
        asked = model.encode(prompt) if isinstance(prompt, str) else prompt
        self._begin("text/event-stream")
        tokens: list[int] = []
        sent = ""
        for found in self.engine.answer(asked, body["max_tokens"]):
            tokens += found
            text = model.decode(tokens)
            whole = text.startswith(sent) and not text.endswith(_HALF_CHARACTER)
            self._send({"choices": [{"index": 0, "text": text[len(sent) :] if whole else ""}]})
            sent = text if whole else sent
        usage = {"prompt_tokens": len(asked), "completion_tokens": len(tokens)}
        self._send({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        """Write no line per request."""

    def _begin(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    """Takes many connections at once: with five, the default, others wait for a second."""

    request_queue_size = 128


def make_server(model: Model, port: int) -> ThreadingHTTPServer:
    """Return a server of a model, on the loopback address."""
    handler = type("ModelHandler", (Handler,), {"engine": Engine(model)})
    return Server(("127.0.0.1", port), handler)


if __name__ == "__main__":
    port, *sizes = map(int, sys.argv[2:])
    make_server(OpenVinoModel(sys.argv[1], *sizes), port).serve_forever()
