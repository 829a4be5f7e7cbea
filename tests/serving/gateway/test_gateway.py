"""A gateway in front of one server, through real sockets."""

import asyncio
from typing import ClassVar, Literal

import pytest
from gateway_serving import run, serve
from stub_upstream import PAD, StubModel, StubUpstream

from midfill.cli.gateway import banner

PREFIX = "".join(f"value_{number} = {number}\n" for number in range(60))
SUFFIX = "\nprint(value_1)\n"


def test_the_planner_lays_the_prompt_out_in_the_models_format() -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                answer = await gateway.complete(prompt=PREFIX + "total = ", suffix=SUFFIX)
            assert answer["choices"][0]["text"] == "x + 1"
            assert answer["midfill"]["layout"] == "efim"
            (prompt,) = upstream.prompts
            head, rest = prompt.split("⟦<|fim_suffix|>⟧")
            assert head.startswith("⟦<|fim_prefix|>⟧value_0 = 0\n")
            assert rest.startswith(SUFFIX + "⟦<|fim_middle|>⟧")

    run(test())


def test_typing_finds_all_but_what_was_typed_in_the_servers_cache() -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                await gateway.complete(prompt=PREFIX + "total = (", suffix=SUFFIX)
                typed = await gateway.complete(prompt=PREFIX + "total = (value_1 +", suffix=SUFFIX)
            usage = typed["usage"]
            computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            assert computed == len("value_1 +")

    run(test())


def test_clients_are_told_the_context_in_tokens_though_prompts_are_counted_in_characters() -> None:
    async def test() -> None:
        with StubUpstream(StubModel(context=2048)) as upstream:
            async with serve(upstream.url) as gateway:
                models = (await gateway.client.get("/v1/models")).json()
                slots = (await gateway.client.get("/slots")).json()
        assert models["data"][0]["max_model_len"] == 2048
        assert {slot["n_ctx"] for slot in slots} == {2048}

    run(test())


def test_answers_of_other_servers_have_no_candidates() -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                body = {"prompt": "a = ", "suffix": "\n", "midfill": {"candidates": 2}}
                response = await gateway.client.post("/v1/completions", json=body)
                assert response.status_code == 400
                assert response.json()["error"]["param"] == "midfill.candidates"
                body["midfill"] = {"candidates": 1}
                response = await gateway.client.post("/v1/completions", json=body)
                assert response.status_code == 200

    run(test())


@pytest.mark.parametrize("owner", ["vllm", "sglang", "midfill", "somebody"])
def test_servers_of_openais_api_are_asked_for_raw_completions(owner: str) -> None:
    async def test() -> None:
        with StubUpstream(StubModel(owner=owner)) as upstream:
            async with serve(upstream.url) as gateway:
                await gateway.complete(prompt="a = ", suffix="\n", max_tokens=7, temperature=0)
            (request,) = upstream.received
            assert request.path == "/v1/completions"
            assert "suffix" not in request.body
            assert request.body["max_tokens"] == 7 + 1  # the blank is written again
            assert request.body["temperature"] == 0
            verbatim = request.body.get("midfill", {}).get("layout") == "verbatim"
            assert verbatim == (owner == "midfill")

    run(test())


def test_llama_cpp_is_asked_in_its_own_api_once_per_answer() -> None:
    async def test() -> None:
        with StubUpstream(StubModel(owner="llamacpp")) as upstream:
            async with serve(upstream.url) as gateway:
                answer = await gateway.complete(prompt="a =", suffix="\n", n=2, seed=5)
            assert [each["text"] for each in answer["choices"]] == [" x + 1"] * 2
            assert [each.path for each in upstream.received] == ["/completion"] * 2
            assert {each.body["seed"] for each in upstream.received} == {5, 6}

    run(test())


def test_a_token_that_llama_cpp_does_not_end_with_ends_the_answer() -> None:
    async def test() -> None:
        model = StubModel(answer=lambda _: f" a{PAD}{PAD}bcd", owner="llamacpp")
        with StubUpstream(model) as upstream:
            async with serve(upstream.url) as gateway:
                answer = await gateway.complete(prompt="x =", suffix="\n")
            assert answer["choices"][0]["text"] == " a"
            assert answer["choices"][0]["finish_reason"] == "stop"

    run(test())


class TestHalfWords:
    def test_the_half_word_is_not_in_the_prompt_nor_in_the_answer(self) -> None:
        async def test() -> None:
            with StubUpstream(StubModel(answer=lambda _: " print(x)")) as upstream:
                async with serve(upstream.url) as gateway:
                    answer = await gateway.complete(prompt="x = 1; pri", suffix="\n")
                assert upstream.prompts[0].endswith("x = 1;")
                assert answer["choices"][0]["text"] == "nt(x)"
                assert answer["midfill"]["healed"] == len(" pri")

        run(test())

    def test_an_answer_that_begins_otherwise_is_asked_for_again(self) -> None:
        def say(prompt: str) -> str:
            return "nt(x)" if prompt.endswith("pri") else " quit()"

        async def test() -> None:
            with StubUpstream(StubModel(answer=say)) as upstream:
                async with serve(upstream.url) as gateway:
                    answer = await gateway.complete(prompt="x = 1; pri", suffix="\n", n=2)
                    metrics = (await gateway.client.get("/metrics")).text
                assert [each["text"] for each in answer["choices"]] == ["nt(x)"] * 2
                assert len(upstream.received) == 3
                assert "midfill:answers_asked_again_total 2.0" in metrics

        run(test())

    @pytest.mark.parametrize("owner", ["vllm", "sglang", "llamacpp"])
    def test_a_server_that_can_is_made_to_write_it_first(self, owner: str) -> None:
        def say(prompt: str) -> str:
            return "nt(x)" if prompt.endswith(" (pri") else " quit()"

        async def test() -> None:
            with StubUpstream(StubModel(answer=say, owner=owner, forces="yes")) as upstream:
                async with serve(upstream.url) as gateway:
                    answer = await gateway.complete(prompt="x = 1; (pri", suffix="\n")
                assert answer["choices"][0]["text"] == "nt(x)"
                (request,) = upstream.received
                assert request.prompt.endswith("x = 1; (")

        run(test())

    @pytest.mark.parametrize("owner", ["vllm", "sglang"])
    def test_a_server_whose_answers_would_not_end_is_asked_again_instead(self, owner: str) -> None:
        def say(prompt: str) -> str:
            return "nt(x)" if prompt.endswith("pri") else " quit()"

        async def test() -> None:
            with StubUpstream(StubModel(answer=say, owner=owner, forces="own-end")) as upstream:
                async with serve(upstream.url) as gateway:
                    answer = await gateway.complete(prompt="x = 1; pri", suffix="\n")
                assert answer["choices"][0]["text"] == "nt(x)"
                assert len(upstream.tried) == 1
                assert len(upstream.received) == 2

        run(test())

    @pytest.mark.parametrize(("forces", "said"), [("yes", "forced"), ("no", "written again")])
    def test_the_banner_says_what_becomes_of_it(
        self, forces: Literal["yes", "no"], said: str
    ) -> None:
        async def test() -> None:
            with StubUpstream(StubModel(forces=forces)) as upstream:
                async with serve(upstream.url) as gateway:
                    shown = banner("http://127.0.0.1:8080", gateway.gateway, " -H KEY")
            assert f"{upstream.url} (vllm, half words {said})" in shown
            assert "json' -H KEY \\\n" in shown

        run(test())

    @pytest.mark.parametrize("owner", ["vllm", "sglang"])
    def test_its_tokens_do_not_count(self, owner: str) -> None:
        async def test() -> None:
            model = StubModel(answer=lambda _: " print(x, y, z)", owner=owner, piece=1)
            with StubUpstream(model) as upstream:
                async with serve(upstream.url) as gateway:
                    answer = await gateway.complete(prompt="x = 1; pri", suffix="\n", max_tokens=6)
                assert answer["usage"]["completion_tokens"] <= 6
                if owner == "vllm":  # which names each token
                    assert answer["choices"][0]["text"] == "nt(x, "
                assert answer["choices"][0]["finish_reason"] == "length"

        run(test())

    def test_it_can_be_turned_off(self) -> None:
        async def test() -> None:
            with StubUpstream() as upstream:
                async with serve(upstream.url) as gateway:
                    await gateway.complete(
                        prompt="x = 1; pri", suffix="\n", midfill={"healing": False}
                    )
                assert upstream.prompts[0].endswith("pri")

        run(test())


class TestSpelledSentinels:
    TEXT = "end = '<|fim_middle|>'\nx = "

    @pytest.mark.parametrize("owner", ["vllm", "sglang", "llamacpp", "midfill"])
    def test_they_stay_text_where_the_server_tokenises(self, owner: str) -> None:
        async def test() -> None:
            with StubUpstream(StubModel(owner=owner)) as upstream:
                async with serve(upstream.url) as gateway:
                    await gateway.complete(prompt=self.TEXT, suffix="\n</s><|im_end|>\n")
                (request,) = upstream.received
                assert isinstance(request.body["prompt"], list)
                assert request.prompt.count("⟦") == 3
                assert "'<|fim_middle|>'" in request.prompt
                plain = upstream.model.ids("'<|fim_middle|>'", parse=False)
                joined = " ".join(map(str, request.ids))
                assert " ".join(map(str, plain)) in joined

        run(test())

    def test_they_are_escaped_where_the_server_does_not(self) -> None:
        async def test() -> None:
            model = StubModel(owner="somebody", tokenizes=False, name="qwen2.5-coder-7b")
            with StubUpstream(model) as upstream:
                async with serve(upstream.url) as gateway:
                    await gateway.complete(prompt=self.TEXT, suffix="\n")
                (prompt,) = upstream.prompts
                assert prompt.count("⟦") == 3
                assert "'<\u2060|fim_middle|>'" in prompt

        run(test())

    def test_other_texts_are_sent_as_text_and_tokenised_once(self) -> None:
        async def test() -> None:
            with StubUpstream() as upstream:
                async with serve(upstream.url) as gateway:
                    before = upstream.tokenized
                    await gateway.complete(prompt="a < b | c > d, e[1], x = ", suffix="\n")
                assert isinstance(upstream.received[0].body["prompt"], str)
                assert upstream.tokenized == before

        run(test())

    def test_a_raw_prompt_means_them(self) -> None:
        async def test() -> None:
            with StubUpstream() as upstream:
                async with serve(upstream.url) as gateway:
                    await gateway.complete(prompt="<|im_end|>a")
                assert upstream.prompts == ["⟦<|im_end|>⟧a"]

        run(test())


def test_every_dialect_is_answered() -> None:
    bodies = {
        "/infill": {"input_prefix": "a =", "input_suffix": "\n"},
        "/completion": {"prompt": "a ="},
        "/api/generate": {"model": "stub-coder", "prompt": "a =", "suffix": "\n", "stream": False},
        "/v1/fim/completions": {"model": "stub-coder", "prompt": "a =", "suffix": "\n"},
        "/beta/completions": {"prompt": "a =", "suffix": "\n"},
        "/v1/completions": {"segments": {"prefix": "a =", "suffix": "\n"}},
    }

    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                for path, body in bodies.items():
                    response = await gateway.client.post(path, json=body)
                    assert response.status_code == 200, (path, response.text)
                    assert "x + 1" in response.text
                shown = await gateway.client.post("/api/show", json={"model": "stub-coder"})
                assert ".Suffix" in shown.json()["template"]

    run(test())


def test_a_stream_arrives_in_pieces_with_the_servers_usage() -> None:
    async def test() -> None:
        with StubUpstream(StubModel(answer=lambda _: "abcdef")) as upstream:
            async with serve(upstream.url) as gateway:
                events = await gateway.stream(
                    prompt="a =", suffix="\n", stream_options={"include_usage": True}
                )
        texts = [event["choices"][0]["text"] for event in events if event["choices"]]
        assert "".join(texts) == "abcdef"
        assert len(texts) > 2
        assert events[-1]["usage"]["completion_tokens"] == 6
        assert events[-1]["usage"]["prompt_tokens"] == len(upstream.received[0].ids)

    run(test())


def test_cached_tokens_are_left_out_of_an_answer_that_ends_before_the_server_tells_them() -> None:
    async def test() -> None:
        with StubUpstream(StubModel(answer=lambda _: "abcdef" * 50), hold=0.02) as upstream:
            async with serve(upstream.url) as gateway:
                request = {"prompt": PREFIX + "a =", "suffix": SUFFIX, "max_tokens": 300}
                cut = await gateway.complete(**request, stop="fa")
                upstream.model, upstream.hold = StubModel(), 0.0
                whole = await gateway.complete(**request)
        assert cut["choices"][0]["text"] == "abcde"
        assert "prompt_tokens_details" not in cut["usage"]
        assert not {"cached_tokens", "computed_tokens"} & cut["midfill"].keys()
        cached = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0
        assert whole["midfill"]["cached_tokens"] == cached

    run(test())


def test_a_client_that_goes_ends_the_servers_request() -> None:
    async def test() -> None:
        with StubUpstream(StubModel(answer=lambda _: "abcdef" * 50), hold=0.2) as upstream:
            async with serve(upstream.url) as gateway:
                body = {"prompt": "a =", "suffix": "\n", "stream": True}
                async with gateway.client.stream("POST", "/v1/completions", json=body) as response:
                    async for _ in response.aiter_lines():
                        break
                (counted,) = gateway.gateway.pool.upstreams
                while counted.running or not upstream.received[0].abandoned:
                    await asyncio.sleep(0.05)

    run(test())


class TestTenants:
    KEYS = ("first-key", "second-key")

    def test_they_share_neither_documents_nor_salts(self) -> None:
        async def test() -> None:
            with StubUpstream() as upstream:
                async with serve(upstream.url, keys=self.KEYS) as gateway:
                    documents = set()
                    for key in self.KEYS:
                        response = await gateway.client.post(
                            "/v1/completions",
                            json={"prompt": PREFIX, "suffix": SUFFIX, "midfill": {"document": "a"}},
                            headers={"authorization": f"Bearer {key}"},
                        )
                        documents.add(response.json()["midfill"]["document"])
                    assert len(documents) == 2
                assert len({each.body["cache_salt"] for each in upstream.received}) == 2

        run(test())

    def test_a_wrong_key_reaches_no_server(self) -> None:
        async def test() -> None:
            with StubUpstream() as upstream:
                async with serve(upstream.url, keys=self.KEYS) as gateway:
                    status, message = await gateway.refused(prompt="a", suffix="b")
                assert (status, upstream.received) == (401, [])
                assert "API key" in message

        run(test())

    def test_the_servers_own_key_is_the_gateways(self) -> None:
        async def test() -> None:
            with StubUpstream() as upstream:
                async with serve(upstream.url, keys=self.KEYS, upstream_key="secret") as gateway:
                    await gateway.client.post(
                        "/v1/completions",
                        json={"prompt": "a", "suffix": "b"},
                        headers={"authorization": "Bearer first-key"},
                    )
                assert upstream.received[0].headers["authorization"] == "Bearer secret"

        run(test())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"logprobs": 1},
            "log probabilities, and how sure an answer is, can't be had through the gateway",
        ),
        ({"prompt": [1, 2], "suffix": None}, "needs the model's tokenizer"),
        ({"midfill": {"empty_threshold": 0.5}}, "can't decide by the probability"),
    ],
)
def test_what_only_an_engine_can_do_is_refused(fields: dict[str, object], message: str) -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                status, said = await gateway.refused(
                    **{"prompt": "a", "suffix": "b", "max_tokens": 4, **fields}
                )
            assert status == 400
            assert message in said

    run(test())


class TestPredictions:
    """What an answer will probably be, as the last one in the document or the client says."""

    @pytest.mark.parametrize("healing", [True, False])
    def test_a_midfill_drafts_the_rest_of_the_last_answer(self, *, healing: bool) -> None:
        def say(prompt: str) -> str:
            return "nt(x)" if prompt.endswith("pri") else " print(x)"

        async def test() -> None:
            with StubUpstream(StubModel(owner="midfill", answer=say)) as upstream:
                async with serve(upstream.url) as gateway:
                    for typed in ("pri", "print"):
                        body = {"prompt": f"x = 1; {typed}", "suffix": "\n"}
                        await gateway.complete(**body, midfill={"healing": healing})
                first, second = (each.body for each in upstream.received)
                assert "prediction" not in first
                expected = " print(x)" if healing else "(x)"
                assert second["prediction"] == {"type": "content", "content": expected}

        run(test())

    def test_an_answer_without_text_predicts_nothing(self) -> None:
        async def test() -> None:
            with StubUpstream(StubModel(owner="midfill", answer=lambda _: "")) as upstream:
                async with serve(upstream.url) as gateway:
                    for _ in range(2):
                        await gateway.complete(prompt="a = ", suffix="\n")
                assert all("prediction" not in each.body for each in upstream.received)

        run(test())

    def test_where_the_half_word_is_in_the_prompt_it_is_not_predicted(self) -> None:
        def say(prompt: str) -> str:
            return "nt(x)" if prompt.endswith("pri") else " quit()"

        async def test() -> None:
            with StubUpstream(StubModel(owner="midfill", answer=say)) as upstream:
                async with serve(upstream.url) as gateway:
                    content = {"type": "content", "content": "nt(x)"}
                    await gateway.complete(prompt="x = 1; pri", suffix="\n", prediction=content)
                said = [each.body["prediction"]["content"] for each in upstream.received]
                assert said == [" print(x)", "nt(x)"]

        run(test())

    def test_others_are_told_nothing(self) -> None:
        async def test() -> None:
            with StubUpstream() as upstream:
                async with serve(upstream.url) as gateway:
                    content = {"type": "content", "content": "x"}
                    await gateway.complete(prompt="a = ", suffix="\n", prediction=content)
                assert "prediction" not in upstream.received[0].body

        run(test())


class TestHints:
    """What clients say of a request for whoever schedules it."""

    HINTS: ClassVar[dict[str, object]] = {
        "priority": -2, "job_id": "task", "is_last_step": True, "expected_tokens": 9,
    }  # fmt: skip

    def test_a_midfill_is_told_them(self) -> None:
        async def test() -> None:
            with StubUpstream(StubModel(owner="midfill")) as upstream:
                async with serve(upstream.url) as gateway:
                    await gateway.complete(prompt="a", **self.HINTS)
                    await gateway.complete(prompt="a")
                first, second = (each.body for each in upstream.received)
                assert {name: first[name] for name in self.HINTS} == self.HINTS
                assert not set(second) & set(self.HINTS)

        run(test())

    @pytest.mark.parametrize("owner", ["vllm", "sglang", "somebody"])
    def test_others_are_not(self, owner: str) -> None:
        async def test() -> None:
            with StubUpstream(StubModel(owner=owner)) as upstream:
                async with serve(upstream.url) as gateway:
                    await gateway.complete(prompt="a", **self.HINTS)
                (request,) = upstream.received
                assert not set(request.body) & set(self.HINTS)

        run(test())

    def test_the_requests_of_a_job_go_to_one_server(self) -> None:
        async def test() -> None:
            with StubUpstream() as one, StubUpstream() as other:
                async with serve(one.url, other.url) as gateway:
                    for number in range(20):
                        await gateway.complete(prompt=f"{number} a", job_id="task")
                    assert {len(one.received), len(other.received)} == {0, 20}
                    for number in range(20):
                        await gateway.complete(prompt=f"{number} a", job_id=f"task {number}")
                    assert min(len(one.received), len(other.received)) > 0

        run(test())

    def test_a_keys_job_is_no_others_and_its_priority_its_own(self) -> None:
        async def test() -> None:
            with StubUpstream(StubModel(owner="midfill")) as upstream:
                async with serve(upstream.url, keys=("a", "b")) as gateway:
                    for key in ("a", "b", "a"):
                        response = await gateway.client.post(
                            "/v1/completions", json={"prompt": "a", **self.HINTS},
                            headers={"authorization": f"Bearer {key}"},
                        )  # fmt: skip
                        assert response.status_code == 200
                jobs = [each.body["job_id"] for each in upstream.received]
                assert jobs[0] == jobs[2] != jobs[1]
                assert "task" not in jobs
                assert all("priority" not in each.body for each in upstream.received)

        run(test())
