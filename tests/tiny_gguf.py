# SPDX-License-Identifier: AGPL-3.0-or-later
"""A language model of about a megabyte that llama.cpp loads in no time, for tests.

Its weights are noise, so it says nothing; yet every other part of a backend is the real one:
tokeniser, chat template, sampling, token counts, streaming, JSON grammars, overflow.
``write_tiny_model`` makes the file, nothing is downloaded.

What comes out is steered, so that tests end: the words it knows are likely, the marks of JSON come
often enough to close a string, raw bytes never come, and the end of the turn has a fixed chance at
each step.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float32]

WORDS = """
a and are as at be by for from has he in is it of on or she that the they this to was we will with
you one two three four five six seven eight nine ten many few some all none more less first last
next red green blue yellow white black warm cold old young big little open closed early late near
far fast slow apple bridge cloud door earth forest garden harbour island journey key lamp mountain
night ocean paper question road silver table umbrella valley window winter yard zebra answer book
city day evening friend add ask begin bring build call carry come count draw end find give go keep
know learn look make move read say see send show sing stand stop take tell think turn use wait
walk want work write yes no true false null
"""

START, TURN, TURN_END = "<|start|>", "<|turn|>", "<|turn_end|>"

# <|turn|>role, a line feed, the text, <|turn_end|>. Tools are announced in a system turn, and calls
# and their results are written in the tags of the Hermes convention, which llama.cpp recognises.
CHAT_TEMPLATE = """
{%- macro turn(role, text) -%}
<|turn|>{{ role }}
{{ text }}<|turn_end|>
{% endmacro -%}
{%- if tools -%}
{%- set announcement -%}
You may call these functions:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
A call is written as
<tool_call>
{"name": <function>, "arguments": <object>}
</tool_call>
{%- endset -%}
{{ turn('system', announcement) }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ turn('user', '<tool_response>\\n' + message.content + '\\n</tool_response>') }}
{%- elif message.tool_calls -%}
{%- set calls -%}
{{ message.content or '' }}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {% if call.function.arguments is string -%}
{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif %}}
</tool_call>
{%- endfor -%}
{%- endset -%}
{{ turn(message.role, calls) }}
{%- else -%}
{{ turn(message.role, message.content or '') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|turn|>assistant
{% endif -%}
"""

HEAD_COUNT = 4
LAYER_COUNT = 2
WIDTH = 64  # the smallest that keeps 16 numbers a head
HIDDEN_WIDTH = 128

# Llama models have no bias at their output. One number of every token's vector is therefore large
# and never changed by a layer, and the output weights of that number act as the bias.
STEADY = 0
STEADY_VALUE = 8.0

NEVER = -40.0
RARELY = -12.0


@dataclass
class Tokeniser:
    """Byte-level pair encoding in GPT-2's form: every byte is a token, and merges lead from letters
    to known words.
    """

    tokens: list[str] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    @property
    def ids(self) -> dict[str, int]:
        """Token to its number."""
        return {token: number for number, token in enumerate(self.tokens)}


def spell_bytes() -> list[str]:
    """GPT-2's letter for each byte: itself where it can be printed, else the next one from 256
    on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def build_tokeniser() -> Tokeniser:
    """Bytes, then the words with and without a space before them, then the marks of the
    template.
    """
    letters = spell_bytes()
    tokeniser = Tokeniser(tokens=list(letters))
    known = set(letters)
    for word in WORDS.split():
        for spelling in (letters[ord(" ")] + word, word):
            for length in range(2, len(spelling) + 1):
                if (piece := spelling[:length]) not in known:
                    known.add(piece)
                    tokeniser.tokens.append(piece)
                    tokeniser.merges.append(f"{piece[:-1]} {piece[-1]}")
        tokeniser.words.append(letters[ord(" ")] + word)
    tokeniser.tokens += [START, TURN, TURN_END]
    return tokeniser


def build_bias(tokeniser: Tokeniser, end_chance: float) -> Matrix:
    """The logarithm of each token's wanted share of the text."""
    ids = tokeniser.ids
    bias = np.full(len(ids), NEVER, dtype=np.float32)
    for letter in spell_bytes()[ord(" ") : ord("~") + 1]:
        bias[ids[letter]] = RARELY  # a grammar may leave nothing else
    for digit in "0123456789":
        bias[ids[digit]] = math.log(0.001)
    for mark, share in (('"', 0.04), (".", 0.02), (",", 0.02), ("}", 0.02), ("]", 0.02)):
        bias[ids[mark]] = math.log(share)
    for word in tokeniser.words:
        bias[ids[word]] = math.log(0.8 / len(tokeniser.words))
    bias[ids[TURN_END]] = math.log(end_chance)
    return bias


def build_tensors(tokeniser: Tokeniser, end_chance: float, seed: int) -> dict[str, Matrix]:
    """All weights by llama.cpp's names, rows first."""
    random = np.random.default_rng(seed)

    def noise(rows: int, columns: int, size: float) -> Matrix:
        return random.normal(0.0, size, (rows, columns)).astype(np.float32)

    def layer_output(columns: int) -> Matrix:
        matrix = noise(WIDTH, columns, 0.1)
        matrix[STEADY] = 0.0
        return matrix

    count = len(tokeniser.tokens)
    embedding = noise(count, WIDTH, 0.3)
    embedding[:, STEADY] = STEADY_VALUE
    # The last norm divides by the vector's size, so the steady number arrives as this on average.
    arriving = float(np.mean(STEADY_VALUE / np.sqrt(np.mean(embedding**2, axis=1))))
    output = np.zeros((count, WIDTH), dtype=np.float32)
    word_ids = [tokeniser.ids[word] for word in tokeniser.words]
    # Words depend a little on what came before, marks do not.
    output[word_ids] = noise(len(word_ids), WIDTH, 0.1)
    output[:, STEADY] = build_bias(tokeniser, end_chance) / arriving

    tensors = {
        "token_embd.weight": embedding,
        "output_norm.weight": np.ones(WIDTH, np.float32),
        "output.weight": output,
    }
    for number in range(LAYER_COUNT):
        layer = {
            "attn_norm": np.ones(WIDTH, np.float32),
            "attn_q": noise(WIDTH, WIDTH, 0.1),
            "attn_k": noise(WIDTH, WIDTH, 0.1),
            "attn_v": noise(WIDTH, WIDTH, 0.1),
            "attn_output": layer_output(WIDTH),
            "ffn_norm": np.ones(WIDTH, np.float32),
            "ffn_gate": noise(HIDDEN_WIDTH, WIDTH, 0.1),
            "ffn_up": noise(HIDDEN_WIDTH, WIDTH, 0.1),
            "ffn_down": layer_output(HIDDEN_WIDTH),
        }
        tensors |= {f"blk.{number}.{name}.weight": matrix for name, matrix in layer.items()}
    return tensors


def write_tiny_model(
    path: Path, *, context_tokens: int = 4096, end_chance: float = 0.0001, seed: int = 1
) -> None:
    """Write the model. ``end_chance`` is that of the turn's end at each step.

    So small that no reply is empty by chance: a token limit, a stop word, a grammar or a bias ends
    most.
    """
    tokeniser = build_tokeniser()
    ids = tokeniser.ids
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_context_length(context_tokens)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN_WIDTH)
    writer.add_block_count(LAYER_COUNT)
    writer.add_head_count(HEAD_COUNT)
    writer.add_head_count_kv(HEAD_COUNT)
    writer.add_rope_dimension_count(WIDTH // HEAD_COUNT)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)

    control = len((START, TURN, TURN_END))
    writer.add_vocab_size(len(tokeniser.tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokeniser.tokens)
    writer.add_token_types(
        [gguf.TokenType.NORMAL] * (len(ids) - control) + [gguf.TokenType.CONTROL] * control
    )
    writer.add_token_merges(tokeniser.merges)
    writer.add_bos_token_id(ids[START])
    writer.add_pad_token_id(ids[START])
    writer.add_eos_token_id(ids[TURN_END])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE.strip())

    for name, matrix in build_tensors(tokeniser, end_chance, seed).items():
        writer.add_tensor(name, matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
