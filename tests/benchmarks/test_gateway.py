"""bench gateway: the same load with and without a gateway, in processes of their own."""

import pytest

from benchmarks.gateway import GatewayLoad, gateway_table, measure_gateway


@pytest.mark.timeout(120)
def test_both_ways_answer_every_request() -> None:
    load = GatewayLoad(rate=20, seconds=1, repeats=1, documents=4, output_tokens=4)
    report = measure_gateway(load)
    assert report.direct.requests == report.gateway.requests == 20
    assert report.direct.whole_p50 >= 130  # 100 ms, and 10 ms for each further token
    rows = gateway_table(report).rows
    assert [row[""] for row in rows] == ["server alone", "through the gateway", "added"]
    assert float(rows[1]["answer, p50"]) > 0
