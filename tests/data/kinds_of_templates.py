"""Chat templates of our own, one a kind: how published templates differ, in as little as shows it.

Each has a tokenizer of bytes, in which what looks like a special token is one.
"""

import re
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = re.compile(r"<\|[\w]+\|>|\[/?[A-Z_]+\]|</?s>")
BEGINS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"

PLAIN = (
    TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + CALLS
    + "<|im_end|>\n{% endfor %}"
    + BEGINS
)
# roles by name, in a chain that has no end: all others leave nothing
ROLES = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    + BEGINS
)
# system messages first, wherever they stand
HOISTS = (
    "{% for m in messages if m.role == 'system' %}<|im_start|>system\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + BEGINS
)
# thinking before the last question is left out
FORGETS = (
    "{% set last = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.n = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content and loop.index0 > last.n %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if loop.index0 > last.n %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}"
    "{% else %}{{ m.content }}{% endif %}" + CALLS + "<|im_end|>\n{% endfor %}" + BEGINS
)
# as GLM: the next message's role ends a turn; arguments are iterated over
NEXT_ROLE = (
    "[GMASK]{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}\n<key>{{ k }}</key><value>{{ v }}</value>"
    "{% endfor %}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# as gpt-oss: channels, the last turn alone ends by <|return|>, calls go by <|call|>, results by the call's name
CHANNELS = (
    "{% set its = namespace(tool=none) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('channels are no content') }}{% endif %}"
    "{% if m.tool_calls %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% set its.tool = m.tool_calls[0].function.name %}<|start|>assistant to=functions."
    "{{ its.tool }}<|channel|>commentary json"
    "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif loop.last and not add_generation_prompt %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% elif m.role == 'tool' %}{% if its.tool is none %}{{ raise_exception('a result without a call') }}{% endif %}"
    "<|start|>functions.{{ its.tool }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# as Mistral: ids of nine letters and digits; a turn with calls has no other text
NINE = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'assistant' %}"
    "{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{% if c.id is not defined or c.id | length != 9 %}"
    "{{ raise_exception('nine letters') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% endfor %}]</s>{% else %}{{ m.content }}</s>{% endif %}{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('nine letters') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}'
    "{% endfor %}"
)
# as DeepSeek's first: calls where the content is null alone, and their arguments joined as text
NULL = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<|result|>{{ m.content }}"
    "{% elif m.content is none %}<|assistant|>"
    "{% for c in m.tool_calls %}<|call|>{{ c.function.name + ' ' + c.function.arguments }}"
    "{% endfor %}<|eos|>{% else %}<|assistant|>{{ m.content }}<|eos|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# as Llama 3.1: one call a turn
ONE_CALL = PLAIN.replace(
    "{% for c in m.tool_calls or [] %}",
    "{% if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% for c in m.tool_calls or [] %}",
)
# as Qwen3.5: calls in XML, thoughts before the last question left out, and one begun where the model is asked
XML = (
    "{% set last = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.n = loop.index0 %}{% endif %}{% endfor %}" + TOOLS + "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > last.n %}<think>\n"
    "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and enable_thinking is false %}\n</think>\n\n{% endif %}{% endif %}"
)
# as Gemma: users and models take turns, a system message stands in the first question, and texts are trimmed
TURNS = (
    "<s>{% set rule = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if rule else messages) %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('they take turns') }}{% endif %}"
    "<|turn|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ rule if loop.first }}{{ m.content | trim }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>model\n{% endif %}"
)
# ids of nine letters alone
STRICT = PLAIN.replace(
    "{{ c.function | tojson }}",
    "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ c.function | tojson }}",
)
KINDS = {
    "plain": PLAIN,
    "roles": ROLES,
    "hoists": HOISTS,
    "forgets": FORGETS,
    "next role": NEXT_ROLE,
    "channels": CHANNELS,
    "nine": NINE,
    "null": NULL,
    "one call": ONE_CALL,
    "strict": STRICT,
    "xml": XML,
    "turns": TURNS,
}


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    special = sorted(set(SPECIAL.findall(template)) | {"<|observation|>", "<|user|>", "<|assistant|>", "<|eos|>"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|eos|>", pad_token="<|eos|>")
    made.add_special_tokens({"additional_special_tokens": special})
    made.chat_template = template
    return made


def says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calls(name: str, arguments: Any, id_: str = "call_0") -> dict[str, Any]:
    """The assistant's message with a call."""
    call = {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
    return says("assistant", "", tool_calls=[call])


def result(content: str, id_: str = "call_0") -> dict[str, Any]:
    return says("tool", content, name="add", tool_call_id=id_)
