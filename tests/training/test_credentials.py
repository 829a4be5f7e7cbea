"""Keys, tokens and passwords are recognised; what only looks like them is not."""

import pytest

from midfill.training.credentials import holds_credential

RANDOM = "aB3dE5gH7jK9mN1pQ3rS5tU7vW9xY1zA2bC4"
# Put together here, so that no scanner takes this file for a leak.
FOUND = {
    "private key": "-----BEGIN RSA " + "PRIVATE KEY-----\n" + "MIIEow" + RANDOM * 2,
    "key of any kind": "-----BEGIN " + "PRIVATE KEY-----\n" + RANDOM * 2,
    "aws": "key = AKIA" + "Q7EXAMPL" + "E2345678",
    "github": "ghp" + "_" + RANDOM,
    "github app": "url?token=ghs" + "_" + RANDOM,
    "fine-grained github": "github" + "_pat_" + RANDOM * 2,
    "slack": "xoxb" + "-123456789012-" + RANDOM,
    "openai": "sk" + "-" + RANDOM + "abcdefgh",
    "google": "AIza" + RANDOM[:35],
    "json web token": "eyJ" + RANDOM + ".eyJ" + RANDOM + "." + RANDOM,
    "assigned": f'API_KEY = "{RANDOM}"',
    "assigned, lower case": f"password='{RANDOM}'",
    "argument": f'connect(secret="{RANDOM}")',
    "attribute": f"self.token = '{RANDOM}'",
    "key of a mapping": f'{{"api_key": "{RANDOM}"}}',
    "longer key of a mapping": f"{{'SessionToken': '{RANDOM}'}}",
}
NOT_FOUND = {
    "public key": "-----BEGIN PUBLIC KEY-----\n" + RANDOM * 2,
    "only the header": "-----BEGIN RSA PRIVATE KEY-----\n...",
    "short aws": "AKIA1234",
    "word with sk-": "risk-" + RANDOM + "abcdefgh",
    "short password": 'password = "hunter2"',
    "password of another kind": "password = os.environ['SERVICE_PASSWORD_OF_THE_WHOLE_CLUSTER']",
    "sentence": 'token = "this is a rather long sentence about a token"',
    "other name": f'digest = "{RANDOM}"',
    "name of a token's type": f'token_type: {{"kind": "{RANDOM}"}}',
    "call": "password = get_password_from_the_keyring_of_this_user()",
}


@pytest.mark.parametrize("kind", FOUND)
def test_found(kind: str) -> None:
    assert holds_credential(f"import os\n\n{FOUND[kind]}\n\nx = 1\n")


@pytest.mark.parametrize("kind", NOT_FOUND)
def test_not_found(kind: str) -> None:
    assert not holds_credential(f"import os\n\n{NOT_FOUND[kind]}\n\nx = 1\n")
