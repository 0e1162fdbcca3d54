// The page's words in Chinese, by what they are in English; and which of the two is shown.

const SAVED = "regatta.language"; // localStorage: for the next visit

const CHINESE = {
  "Skip to the message box": "跳到输入框",
  "Choose the model": "选择模型",
  Conversation: "对话",
  "New chat": "新对话",
  Settings: "设置",
  "Dark theme": "深色主题",
  "Dark or light": "深色或浅色",
  "Ask the model": "向模型提问",
  "What you write goes to this server alone. The conversation stays in this tab.":
    "你写的内容只发给这台服务器，对话只留在这个标签页里。",
  Examples: "示例",
  "This page needs JavaScript.": "此页面需要 JavaScript。",
  Latest: "最新",
  Message: "消息",
  "Write a message": "输入消息",
  Send: "发送",
  Stop: "停止",
  "Stop (Esc)": "停止（Esc）",
  " sends, ": " 发送，",
  " starts a new line, ": " 换行，",
  " stops. A model may be wrong.": " 停止。模型可能出错。",
  Close: "关闭",
  "Close (Esc)": "关闭（Esc）",
  Model: "模型",
  Adapter: "适配器",
  "none, the model itself": "不用，模型本身",
  "System prompt": "系统提示词",
  "Stands ahead of this conversation and the next.": "放在本次和下一次对话之前。",
  Sampling: "采样",
  "Left empty, the server's defaults hold.": "留空则用服务器的默认值。",
  "All defaults": "全部恢复默认",
  "A JSON file of this conversation, to keep or to take up again.":
    "本次对话的 JSON 文件，可保存，也可再次载入。",
  Export: "导出",
  Import: "导入",
  "API key": "API 密钥",
  "Enter a key": "输入密钥",
  "Forget it": "忘记密钥",
  "This server asks for a key. It stays in this tab until you close it.":
    "此服务器需要密钥。密钥只留在这个标签页里，关闭即失效。",
  "The server did not take the key that this tab has. Another stays until you close the tab.":
    "服务器不接受这个标签页的密钥。换一个，关闭标签页即失效。",
  Key: "密钥",
  "Use this key": "使用此密钥",
  "This tab has a key. It is gone when you close the tab.": "这个标签页有密钥，关闭即失效。",
  "This tab has none.": "这个标签页没有密钥。",
  "A key is made of letters, digits and signs, without spaces.":
    "密钥由字母、数字和符号组成，不含空格。",
  "Explain continuous batching in three sentences.": "用三句话解释连续批处理。",
  "Write a Python function that merges two sorted lists.": "写一个合并两个有序列表的 Python 函数。",
  "Make a table of the planets and how long their years are.": "列表说明各行星及其一年的长度。",
  Temperature: "温度",
  "0 always takes the likeliest token": "0 总取最可能的词元",
  "Top p": "Top p",
  "likeliest tokens up to this sum of probabilities": "取概率之和不超过此值的最可能词元",
  "Top k": "Top k",
  "likeliest tokens to choose from": "候选的最可能词元个数",
  "Repetition penalty": "重复惩罚",
  "above 1 repeats less": "大于 1 则少重复",
  "Max tokens": "最多词元",
  "longest answer": "回答的最大长度",
  Seed: "随机种子",
  "the same seed, the same answer": "种子相同，回答相同",
  "Stop strings": "停止串",
  "one a line; \\n stands for a new line": "每行一个；\\n 表示换行",
  default: "默认",
  You: "你",
  "What followed is gone.": "其后的内容已删除。",
  "Deleted.": "已删除。",
  "A new chat.": "新对话。",
  Undo: "撤销",
  Dismiss: "知道了",
  "Try again": "重试",
  "The model is answering.": "模型正在回答。",
  Copy: "复制",
  Copied: "已复制",
  "Not allowed": "不允许",
  Edit: "编辑",
  Regenerate: "重新生成",
  Delete: "删除",
  Save: "保存",
  Cancel: "取消",
  "Your message": "你的消息",
  "The answer": "回答",
  "Copy this message": "复制这条消息",
  "Copy this answer": "复制这个回答",
  "Edit this message": "编辑这条消息",
  "Edit this answer": "编辑这个回答",
  "Delete this message": "删除这条消息",
  "Delete this answer": "删除这个回答",
  "Regenerate this answer": "重新生成这个回答",
  "Deletes the message and its answer": "删除消息及其回答",
  "Deletes the answer": "删除回答",
  "What follows this message goes.": "此消息之后的内容会被删除。",
  "Later messages see this text.": "之后的消息会看到这段文字。",
  Reasoning: "思考",
  "Reasoning…": "思考中…",
  stopped: "已停止",
  "cut at the limit of tokens": "到达词元上限",
  "Enter the key": "输入密钥",
  "The server does not take this request.": "服务器不接受这个请求。",
  "The server asks for an API key.": "服务器需要 API 密钥。",
  "This API key may not do that.": "此 API 密钥无权这样做。",
  "The server does not have this.": "服务器没有这项内容。",
  "The server waited too long for the request.": "服务器等待请求超时。",
  "The conversation is too long for this server.": "对话对这台服务器来说太长。",
  "The server has too much to do.": "服务器太忙。",
  "The server failed.": "服务器出错。",
  "The server behind this address does not answer.": "此地址后的服务器没有应答。",
  "The server is not ready.": "服务器尚未就绪。",
  "The server behind this address does not answer in time.": "此地址后的服务器应答超时。",
  "The server cannot be reached. Is it running, and is the network up?":
    "无法连接服务器。它在运行吗？网络通吗？",
  "The connection ended before the answer did.": "回答未完，连接已断。",
  "The server sent something that is not JSON.": "服务器发来的不是 JSON。",
  "The server could not finish the answer.": "服务器没能完成回答。",
  "The page could not read the answer.": "页面无法读取回答。",
};

let language = "en";
try {
  const saved = localStorage.getItem(SAVED);
  const own = navigator.language?.toLowerCase().startsWith("zh") ? "zh" : "en";
  language = saved === "zh" || saved === "en" ? saved : own;
} catch {
  // Storage is off: the page is in English.
}

/** "en" or "zh". */
export const shownLanguage = language;

/** Words of the page, in the language that is shown. */
export function words(english) {
  return language === "zh" ? (CHINESE[english] ?? english) : english;
}

/** Shows the page in a language from now on: it is loaded again, and the conversation stays. */
export function changeLanguage(chosen) {
  try {
    localStorage.setItem(SAVED, chosen);
  } catch {
    return; // It would come back as it is.
  }
  location.reload();
}

/** Puts what index.html says into the language that is shown. */
export function translate(root) {
  if (language !== "zh") return;
  document.documentElement.lang = "zh-CN";
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const text = node.data.replace(/\s+/g, " ");
    const found = CHINESE[text] ?? CHINESE[text.trim()];
    if (found !== undefined) node.data = found;
  }
  for (const name of ["aria-label", "title", "placeholder"]) {
    for (const each of root.querySelectorAll(`[${name}]`)) {
      each.setAttribute(name, words(each.getAttribute(name)));
    }
  }
}
