package co.cask.cdap.messaging.store.hbase;

import co.cask.cdap.common.conf.CConfiguration;
import co.cask.cdap.common.conf.Constants;
import co.cask.cdap.common.conf.Constants.MessagingSystem;
import co.cask.cdap.data2.util.hbase.HBaseDDLExecutorFactory;
import co.cask.cdap.data2.util.hbase.HBaseTableUtil;
import co.cask.cdap.data2.util.hbase.TableUtil;
import co.cask.cdap.messaging.TopicMetadata;
import co.cask.cdap.messaging.store.MessageTable;
import co.cask.cdap.messaging.store.MetadataTable;
import co.cask.cdap.messaging.store.PayloadTable;
import co.cask.cdap.proto.id.NamespaceId;
import co.cask.cdap.proto.id.TopicId;
import co.cask.cdap.spi.hbase.HBaseDDLExecutor;
import interop.Store;
import java.io.File;
import java.io.IOException;
import java.util.ArrayList;
import java.util.List;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hbase.HBaseConfiguration;
import org.apache.twill.filesystem.LocalLocationFactory;

/**
 * The tables of a CDAP on HBase, which CDAP's factory opens, and creates if they are missing. The class is in CDAP's
 * package because the constructor of the factory is not public.
 */
public final class HBaseStore implements Store {
  private final HBaseTableFactory factory;
  private final MetadataTable metadata;

  /** Connects to HBase through the ZooKeeper on a port of this machine; CDAP's namespace is {@code PREFIX_system}. */
  public HBaseStore(CConfiguration conf, int zooKeeperPort, String prefix) throws IOException {
    conf.set(Constants.Dataset.TABLE_PREFIX, prefix);
    // The observers are for HBase 1; see TableUtil.
    conf.setBoolean("master.manage.hbase.coprocessors", false);
    Configuration hbase = HBaseConfiguration.create();
    hbase.set("hbase.zookeeper.quorum", "127.0.0.1");
    hbase.setInt("hbase.zookeeper.property.clientPort", zooKeeperPort);
    hbase.set(HBaseTableUtil.CFG_HBASE_TABLE_COMPRESSION, "NONE");
    HBaseTableUtil util = new TableUtil();
    util.setCConf(conf);
    // CDAP's master does the same at its start.
    try (HBaseDDLExecutor executor = new HBaseDDLExecutorFactory(conf, hbase).get()) {
      executor.createNamespaceIfNotExists(util.getHBaseNamespace(NamespaceId.SYSTEM));
    }
    File jars = new File(System.getProperty("java.io.tmpdir"));
    factory = new HBaseTableFactory(conf, hbase, util, new LocalLocationFactory(jars));
    metadata = factory.createMetadataTable(conf.get(MessagingSystem.METADATA_TABLE_NAME));
    factory.createMessageTable(conf.get(MessagingSystem.MESSAGE_TABLE_NAME)).close();
    factory.createPayloadTable(conf.get(MessagingSystem.PAYLOAD_TABLE_NAME)).close();
  }

  @Override
  public List<TopicMetadata> topics() throws IOException {
    List<TopicMetadata> topics = new ArrayList<>();
    for (TopicId topic : metadata.listTopics()) {
      try {
        topics.add(metadata.getMetadata(topic));
      } catch (co.cask.cdap.api.messaging.TopicNotFoundException e) {
        throw new IllegalStateException("listed a moment ago: " + topic, e);
      }
    }
    return topics;
  }

  @Override
  public void close() throws IOException {
    metadata.close();
  }

  @Override
  public MetadataTable createMetadataTable(String tableName) throws IOException {
    return factory.createMetadataTable(tableName);
  }

  @Override
  public MessageTable createMessageTable(String tableName) throws IOException {
    return factory.createMessageTable(tableName);
  }

  @Override
  public PayloadTable createPayloadTable(String tableName) throws IOException {
    return factory.createPayloadTable(tableName);
  }
}
