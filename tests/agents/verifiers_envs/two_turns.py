"""A taskset of verifiers 0.4 as its users write them: a question, a second one, and a reward by what was said."""

import verifiers.v1 as vf
from names import NUM_TASKS
from openai import AsyncOpenAI

__all__ = ["TwoTurns", "TwoTurnsEnv", "InProcess"]


class Question(vf.TaskData):
    number: int


class TwoTurnsTask(vf.Task[Question]):
    @vf.reward
    async def said(self, trace) -> float:
        """Characters that the model said, over 100."""
        return sum(len(message.content or "") for message in trace.messages if message.role == "assistant") / 100

    @vf.reward(weight=2.0)
    async def number(self, trace) -> float:
        if self.data.number == 2:
            raise ValueError("on purpose")
        return float(self.data.number)


class TwoTurns(vf.Taskset[TwoTurnsTask]):
    def load(self):
        for number in range(NUM_TASKS):
            yield TwoTurnsTask(Question(prompt=f"{number}+{number}=", number=number), self.config.task)


class TwoTurnsConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})


class TwoTurnsEnv(vf.Env[TwoTurnsConfig]):
    async def run(self, task, agents):
        clients = {key for server in self._interception.servers for key in server.clients}
        assert len(clients) <= 1, f"verifiers keeps {len(clients)} clients for ever"
        async with agents.agent.interaction(task) as talk:
            first = await talk.turn()
            if not first.terminated:
                await talk.turn("more")


class InProcess(vf.Harness[vf.HarnessConfig]):
    """The loop runs here, not as a program."""

    SUPPORTS_RESUME, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        prompt = data.prompt
        messages = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [{"role": message.role, "content": message.content or ""} for message in prompt]
        )
        # Of its own limits one is for connecting, 5 s, which a machine with much to do may need.
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=600.0) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
